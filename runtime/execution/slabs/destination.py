"""Where results of a slab go: rows of a tensor for all slabs, or a sum over them that products add to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ....ir import Value
from ....ir.passes.place import is_plain_product
from ..aten.concat_in_place import multiply_into

Tensor = torch.Tensor


@dataclass(frozen=True)
class Destination:
    """A tensor that a result may be computed into. adds: to what is there."""

    tensor: Tensor
    adds: bool = False


Destinations = Mapping[int, Destination]
"""By the ids of values."""


def product_at(value: Value, destinations: Destinations, operands: list[Tensor]) -> Tensor | None:
    """A product of two matrices computed where it belongs; None where it is none, or belongs nowhere."""
    place = destinations.get(value.id)
    if place is None or not is_plain_product(value):
        return None
    x, y = operands
    return multiply_into(value, place.tensor, x, y, place.adds)
