"""Results that show one memory: `y` and `y.diagonal()`. One of them has all of it, or a value in between has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sympy
import torch

from ..torch_private import memory_of
from ..trace import CaptureError

Tensor = torch.Tensor


def whole_tensors(own: Mapping[int, Tensor]) -> dict[int, int | Tensor]:
    """For each result that is a part: the number of the result that has all of its memory, or that value itself.

    own: results by number. Raises CaptureError where nothing at hand has all of it.
    """
    groups: dict[int, list[int]] = {}
    for number, tensor in own.items():
        groups.setdefault(memory_of(tensor), []).append(number)
    return {n: w for group in groups.values() if len(group) > 1 for n, w in _whole_of_group(group, own).items()}


def _whole_of_group(group: list[int], own: Mapping[int, Tensor]) -> dict[int, int | Tensor]:
    showing_all = [n for n in group if shows_all_memory(own[n])]
    if showing_all:
        number = min(showing_all, key=lambda n: own[n]._is_view())  # a base comes first
        return {n: number for n in group if n != number}
    bases = (own[n]._base for n in group)
    base = next((b for b in bases if b is not None and shows_all_memory(b)), None)
    if base is None:
        raise CaptureError(reason="it returns tensors that share memory, of which none shows all")
    return dict.fromkeys(group, base)


def shows_all_memory(tensor: Tensor) -> bool:
    """True if every byte of the tensor's memory is an element of it, for all sizes."""
    bytes_shown = sympy.Integer(tensor.element_size())
    for n in tensor.shape:
        bytes_shown *= _expression(n)
    storage_bytes = _expression(tensor.untyped_storage().nbytes())
    begins = _expression(tensor.storage_offset()) == 0
    return begins and not tensor.is_conj() and not tensor.is_neg() and sympy.expand(storage_bytes - bytes_shown) == 0


def _expression(size: Any) -> Any:
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first that a layout shows to the last."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if math.prod(shape) else 0
