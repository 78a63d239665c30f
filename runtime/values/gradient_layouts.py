"""Layouts of gradients: the classes that backward is specialised on, and how a gradient comes into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...tracer.function import rebind

Tensor = torch.Tensor


def layout_class(gradient: Tensor | None) -> Any:
    """The layout class of a gradient: "contiguous", "expanded" (every stride 0), or its axes, outermost first.

    (1, 0)  dense, transposed      (0, ~1)  expanded along axis 1, dense otherwise: what `.sum(1)` hands back
    """
    if gradient is None:
        return None
    if gradient.is_contiguous():
        return "contiguous"
    return "expanded" if not any(gradient.stride()) else _axes_by_stride(gradient)


def canonical_layout(gradient: Tensor | None) -> Tensor | None:
    """The gradient itself where its layout has a class, else a copy without the gaps (sliced and stepped gradients)."""
    if gradient is None or gradient.is_contiguous() or not any(gradient.stride()):
        return gradient
    order = _axes_by_stride(gradient)
    moving = tuple(axis for axis in order if axis >= 0)
    core = gradient[tuple(slice(None) if axis in moving else slice(0, 1) for axis in range(gradient.dim()))]
    axes = [*moving, *(~axis for axis in order[len(moving) :])]
    if core.permute(axes).is_contiguous():
        return gradient
    back = sorted(range(len(axes)), key=axes.__getitem__)
    return core.permute(axes).contiguous().permute(back).expand(gradient.shape)


def order_unlike(fake: Any, real: Any, sizes: Mapping[Any, Any]) -> tuple[int, ...] | None:
    """The axes of `real` from outermost to innermost, where it is dense and its strides are not those of `fake`."""
    if not isinstance(fake, Tensor) or not isinstance(real, Tensor) or not real.numel():
        return None
    if real.layout is not torch.strided:
        return None
    expected = rebind(tuple(fake.stride()), sizes)
    if all(a == b or n == 1 for a, b, n in zip(expected, real.stride(), real.shape, strict=True)):
        return None
    return _dense_order(real)


def _axes_by_stride(t: Tensor) -> tuple[int, ...]:
    order = sorted(range(t.dim()), key=lambda i: (-t.stride()[i], -t.shape[i], i))
    still = [i for i in order if t.stride()[i] == 0 and t.shape[i] > 1]
    return (*(i for i in order if i not in still), *(~i for i in still))


def _dense_order(t: Tensor) -> tuple[int, ...] | None:
    """The axes, outermost first, where `t` is dense in that order; None where it has gaps or stands still."""
    order = _axes_by_stride(t)
    return order if min(order, default=0) >= 0 and t.permute(order).is_contiguous() else None


def as_gradient_of(dtype: torch.dtype, shape: Sequence[Any], gradient: Tensor) -> Tensor:
    if [_expr(n) for n in gradient.shape] != [_expr(n) for n in shape]:
        gradient = gradient.sum_to_size(shape)
    return cast_as_gradient(gradient, dtype)


def cast_as_gradient(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """As autograd casts a gradient; a complex one for a real argument is left for it to refuse."""
    return gradient if gradient.dtype == dtype or gradient.is_complex() > dtype.is_complex else gradient.to(dtype)


def _expr(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr
