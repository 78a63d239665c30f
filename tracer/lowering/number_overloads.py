"""Which operations take tensors where they are given numbers: for numbers that each step of a loop has of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch._ops import OpOverload

OVERLOADS = {"Scalar": ("Tensor",), "Tensor_Scalar": ("Tensor_Tensor",), "default": ("default", "Tensor")}
"""By the overload that takes a number, those that may take a tensor instead."""


def taking_tensors(target: Any, places: Collection[int]) -> Any:
    """The overload of an operation that takes tensors as these of its arguments; None where there is none."""
    if not isinstance(target, OpOverload):
        return None
    packet, overload = target.overloadpacket, target._overloadname
    names = [n for n in OVERLOADS.get(overload, (overload,)) if n in packet.overloads()]
    return next((op for n in names if _takes(op := getattr(packet, n), places)), None)


def _takes(op: Any, places: Collection[int]) -> bool:
    types = [str(a.type) for a in op._schema.arguments]
    return all(at < len(types) and "Tensor" in types[at] for at in places)
