"""Indexing: torch's gather, index, index_put, scatter and embedding are the primitives gather and scatter plus iota."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...ir import Size, TensorType, Value, emit
from ...ir.infer import drop_axes, sizes_equal
from ...ir.passes.index_checks import is_never_negative, is_within, walks
from ...ir.switches import is_on
from .rules import (
    Call,
    Result,
    broadcast,
    cast,
    compare,
    fit,
    full,
    is_at_index,
    is_exact,
    permute,
    positions,
    reshape,
    rule,
    where,
)
from .rules_reduce import at_one_index


def check_index(index: Value, size: Size) -> Value:
    """The index, asserted to be in 0 .. size - 1 where nothing shows that it is."""
    if not is_on("index_checks") or is_within(index, size):
        return index
    return emit("check_index", index, full(size, index.aval))


def grid(index: Value, axis: int) -> list[Value]:
    """Index tensors for every axis: the element's own position, and `index` along one axis."""
    return [index if a == axis else positions(index.shape, a) for a in range(index.ndim)]


@rule("gather")
def _gather(call: Call, x: Value, dim: int, index: Value, **_: Any) -> Result:
    if x.ndim == 0 or index.ndim == 0:
        return reshape(x, call.out.shape)
    axis = dim % x.ndim
    index = check_index(cast(index, "i64"), x.shape[axis])
    if index.shape[axis] == 1 and _one_per_line(call, axis):
        return reshape(at_one_index(x, reshape(index, drop_axes(index.shape, (axis,))), axis), call.out.shape)
    return emit("gather", x, *grid(index, axis), axes=tuple(range(x.ndim)))


def _one_per_line(call: Call, axis: int) -> bool:
    """True if the index has the sizes of x on the other axes."""
    pairs = zip(call.args[0].shape, call.args[2].shape, strict=True)
    return all(a == axis or call.agree(*pair) for a, pair in enumerate(pairs))


@rule("scatter_add scatter.src scatter.value")
def _scatter(call: Call, x: Value, dim: int, index: Value, source: Any) -> Result:
    if x.ndim == 0 or index.ndim != x.ndim:
        return None
    mode = "add" if call.name == "scatter_add" else "set"
    axis = dim % x.ndim
    index = check_index(cast(index, "i64"), x.shape[axis])
    if isinstance(source, Value):
        source = emit("slice", source, start=(0,) * x.ndim, stop=index.shape, step=(1,) * x.ndim)
    source = fit(source, TensorType(index.shape, x.dtype))
    if index.shape[axis] == 1 and _one_per_line(call, axis):
        line = drop_axes(index.shape, (axis,))
        return put_at_one_index(x, reshape(index, line), reshape(source, line), axis, mode)
    if mode == "add":
        _agree_on_axes(call, axis)
    return emit("scatter", x, source, *grid(index, axis), axes=tuple(range(x.ndim)), mode=mode)


def _agree_on_axes(call: Call, axis: int) -> None:
    """Guards, where sizes are equal: then an axis of what is added is one of the index, and of what it is added to."""
    x, _, index, source = call.args[:4]
    for a, size in enumerate(index.shape):
        call.agree(size, source.shape[a])
        call.agree(size, x.shape[a] if a != axis else size)


def put_at_one_index(x: Value, index: Value, source: Value, axis: int, mode: str) -> Value:
    """x with `source` put, or added, at one index along an axis: a choice per element, no scatter.

    index, source: x.shape without the axis.
    """
    condition = is_at_index(x, index, axis)
    source = broadcast(source, x.shape, [a for a in range(x.ndim) if a != axis])
    return emit("where", condition, emit("add", x, source) if mode == "add" else source, x)


@rule("index_select")
def _index_select(call: Call, x: Value, dim: int, index: Value) -> Result:
    if x.ndim == 0:
        return x
    axis = dim % x.ndim
    index = reshape(check_index(cast(index, "i64"), x.shape[axis]), (index.aval.numel,))
    picked = emit("gather", x, index, axes=(axis,))
    return permute(picked, [*range(1, axis + 1), 0, *range(axis + 1, x.ndim)])


@rule("index_add index_copy")
def _index_add(call: Call, x: Value, dim: int, index: Value, source: Value, alpha: Any = 1) -> Result:
    """x with the slices of a source added to, or put in the place of, its own; unlike x[index], none from the end."""
    if x.ndim == 0 or index.ndim != 1 or source.ndim != x.ndim or not is_exact(alpha, x.dtype):
        return None
    axis = dim % x.ndim
    source = source if alpha == 1 else emit("mul", source, full(alpha, source.aval))
    front = permute(source, [axis, *(a for a in range(x.ndim) if a != axis)])
    index = check_index(cast(index, "i64"), x.shape[axis])
    return emit("scatter", x, front, index, axes=(axis,), mode="add" if call.name == "index_add" else "set")


@rule("index_fill.int_Scalar index_fill.int_Tensor")
def _index_fill(call: Call, x: Value, dim: int, index: Value, value: Any) -> Result:
    if x.ndim == 0 or index.ndim != 1:
        return None
    axis = dim % x.ndim
    source = fit(value, TensorType((*index.shape, *drop_axes(x.shape, (axis,))), x.dtype))
    return emit("scatter", x, source, _wrapped_inside(index, x.shape[axis]), axes=(axis,), mode="set")


@rule("embedding")
def _embedding(call: Call, weight: Value, index: Value, *_: Any) -> Result:
    return emit("gather", weight, check_index(cast(index, "i64"), weight.shape[0]), axes=(0,))


# ---------------------------------------------------------------------------------------------- x[i, :, j]
def wrap_negative(index: Value, size: Size) -> Value:
    """Negative indices count from the end, where there may be any."""
    index = cast(index, "i64")
    if is_never_negative(index):
        return index
    return where(compare("lt", index, 0), emit("add", index, full(size, index.aval)), index)


def _wrapped_inside(index: Value, size: Size) -> Value:
    """An index in -size .. size - 1 as one in 0 .. size - 1, asserted."""
    return check_index(wrap_negative(index, size), size)


def common_shape(shapes: Sequence[Sequence[Size]]) -> tuple[Size, ...]:
    """The shape that the index tensors broadcast to."""
    ndim = max(map(len, shapes))
    padded = [(*(1,) * (ndim - len(s)), *s) for s in shapes]
    return tuple(next((d for d in sizes if not sizes_equal(d, 1)), 1) for sizes in zip(*padded, strict=True))


def has_mask(index: Sequence[Value | None]) -> bool:
    return any(i is not None and i.dtype in ("b1", "u8") for i in index)


def indexed_axes(x: Value, index: Sequence[Value | None]) -> tuple[list[int], list[Value]]:
    """The indexed axes and their index tensors, wrapped and of one shape; none is a mask."""
    axes = [a for a, i in enumerate(index) if i is not None]
    indices = [i for i in index if i is not None]
    shape = common_shape([i.shape for i in indices])
    inside = [_wrapped_inside(i, x.shape[a]) for a, i in zip(axes, indices, strict=True)]
    return axes, [fit(i, TensorType(shape, "i64")) for i in inside]


def first_place(axes: Sequence[int]) -> int:
    """Where the result has the indexed dimensions: in place when the axes are adjacent, else in front."""
    return axes[0] if list(axes) == list(range(axes[0], axes[0] + len(axes))) else 0


@rule("index.Tensor _unsafe_index.Tensor")
def _index(call: Call, x: Value, index: Sequence[Value | None]) -> Result:
    if has_mask(index):
        return None
    axes, indices = indexed_axes(x, index)
    if (axis := _line_axis(call, axes, indices)) is not None:
        return at_one_index(x, indices[axis], axis)
    picked = emit("gather", x, *indices, axes=tuple(axes))
    at, front = first_place(axes), indices[0].ndim
    return permute(picked, [*range(front, front + at), *range(front), *range(front + at, picked.ndim)])


@rule("index_put _unsafe_index_put")
def _index_put(call: Call, x: Value, index: Sequence[Value | None], source: Value, accumulate: bool = False) -> Result:
    if (masked := _masked_put(call, x, index, source, accumulate)) is not None:
        return masked
    if has_mask(index):
        return None
    _common_shape_of_call(call)
    axes, indices = indexed_axes(x, index)
    other_sizes, at, front = drop_axes(x.shape, axes), first_place(axes), indices[0].ndim
    _source_fits(call, axes, at)
    source = fit(source, TensorType((*other_sizes[:at], *indices[0].shape, *other_sizes[at:]), x.dtype))
    source = permute(source, [*range(at, at + front), *range(at), *range(at + front, source.ndim)])
    if (axis := _line_axis(call, axes, indices)) is not None:
        return put_at_one_index(x, indices[axis], source, axis, "add" if accumulate else "set")
    return emit("scatter", x, source, *indices, axes=tuple(axes), mode="add" if accumulate else "set")


def _common_shape_of_call(call: Call) -> tuple[Any, ...]:
    """The shape that the index tensors broadcast to, as torch gave them: guards that they do, which index_put lacks."""
    return torch.broadcast_shapes(*[i.shape for i in call.args[1] if i is not None])  # type: ignore


def _line_axis(call: Call, axes: Sequence[int], indices: Sequence[Value]) -> int | None:
    """The only axis that is indexed: x[arange(n), i] picks one element per row. None where that is not so."""
    rank = len(call.args[0].shape)
    if list(axes) != list(range(rank)) or indices[0].ndim != rank - 1:
        return None
    shape = _common_shape_of_call(call)
    for axis in reversed(axes):
        other_axes = [a for a in axes if a != axis]
        if all(walks(indices[a], d) and call.agree(call.args[0].shape[a], shape[d]) for d, a in enumerate(other_axes)):
            return axis
    return None


def _source_fits(call: Call, axes: Sequence[int], at: int) -> None:
    """Guards that the source has the sizes of its place, which torch does not: those of the indices, then the rest."""
    x, _, source = call.args[:3]
    shape, other_sizes = _common_shape_of_call(call), drop_axes(x.shape, axes)
    place = (*other_sizes[:at], *shape, *other_sizes[at:])
    for a, b in zip(reversed(place), reversed(source.shape), strict=False):
        call.agree(a, b)


def _masked_put(call: Call, x: Value, index: Sequence[Value | None], source: Value, accumulate: bool) -> Value | None:
    """x[mask] = number is a choice."""
    mask = index[0]
    if accumulate or len(index) != 1 or mask is None or mask.dtype != "b1" or source.aval.numel != 1:
        return None
    for a, b in zip(call.args[0].shape, call.args[1][0].shape, strict=False):
        call.agree(a, b)
    number = fit(reshape(source, ()), x.aval)
    return emit("where", broadcast(mask, x.shape, range(mask.ndim)), number, x)
