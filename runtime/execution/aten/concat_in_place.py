"""Calls that write their results where they belong: slices of a concatenation, taken before its parts are computed."""

from __future__ import annotations

import math

import torch

from ....ir import Value
from ....ir.passes.place import Place
from ....tracer.dtypes import to_torch
from ...values.sizes import Sizes, number, numbers

Tensor = torch.Tensor


def room_for(place: Place, sizes: Sizes, device: torch.device) -> Tensor:
    """Memory for a whole concatenation."""
    return torch.empty(numbers(place.whole.shape, sizes), dtype=to_torch(place.whole.dtype), device=device)


def product_into(value: Value, place: Place, sizes: Sizes, concat: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """A product of rows with a matrix, computed into its slice of `concat`; the slice."""
    shape = numbers(value.shape, sizes)
    part = concat.view(-1).narrow(0, number(place.start, sizes), math.prod(shape)).view(shape)
    if len(shape) == 2:
        return multiply_into(value, part, x, y)
    (*_, k), y_axes = value.params["x_axes"], value.params["y_axes"]
    with torch.no_grad():
        torch.mm(x.flatten(0, -2), y if y_axes[0] == k else y.t(), out=part.view(-1, shape[-1]))
    return part


def multiply_into(value: Value, out: Tensor, x: Tensor, y: Tensor, adds: bool = False) -> Tensor:
    """A product of two matrices, computed into `out`, or added to what is there."""
    x_axes, y_axes, out_axes = (value.params[p] for p in ("x_axes", "y_axes", "out_axes"))
    (k,) = set(x_axes) & set(y_axes)
    lhs, rhs = x if x_axes[1] == k else x.t(), y if y_axes[0] == k else y.t()
    if out_axes[0] in y_axes:
        lhs, rhs = rhs.t(), lhs.t()
    with torch.no_grad():
        return torch.addmm(out, lhs, rhs, out=out) if adds else torch.mm(lhs, rhs, out=out)
