"""Views and copies that move elements: values have no strides, so each is one or two layout primitives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from ...ir import Size, Value, emit
from ...ir.errors import LoweringError
from ...ir.infer import same_shape, sizes_equal
from ...ir.rewrite import number_of
from ...ir.types import INTEGERS, ITEMSIZE, contiguous_strides, simplify_size
from .rules import (
    Call,
    Result,
    broadcast,
    cast,
    cut,
    expand,
    fit,
    full,
    iota,
    permute,
    place,
    reshape,
    rule,
)


@rule("view.default _unsafe_view reshape unsqueeze squeeze flatten _reshape_alias")
@rule("view_copy.default squeeze_copy unsqueeze_copy")
def _reshape(call: Call, x: Value, *_: Any, **__: Any) -> Result:
    return reshape(x, call.out.shape)


@rule("expand expand_copy")
def _expand(call: Call, x: Value, *_: Any, **__: Any) -> Result:
    return expand(x, call.out.shape)


@rule("permute permute_copy")
def _permute(call: Call, x: Value, dims: Sequence[int]) -> Result:
    return permute(x, [d % x.ndim for d in dims])


@rule("transpose.int transpose_copy")
def _transpose(call: Call, x: Value, i: int, j: int) -> Result:
    return swap(x, i, j) if x.ndim else x


@rule("t t_copy")
def _t(call: Call, x: Value) -> Result:
    return swap(x, 0, 1) if x.ndim == 2 else x


def swap(x: Value, i: int, j: int) -> Value:
    perm = list(range(x.ndim))
    perm[i], perm[j] = perm[j], perm[i]
    return permute(x, perm)


@rule("flip")
def _flip(call: Call, x: Value, dims: Sequence[int]) -> Result:
    axes = tuple(sorted(d % x.ndim for d in dims)) if x.ndim else ()
    return emit("flip", x, axes=axes) if axes else x


@rule("roll")
def _roll(call: Call, x: Value, shifts: Any, dims: Any = ()) -> Result:
    """cat(x[n-s:], x[:n-s]) along each axis; without dims, on the flat tensor."""
    given, shifts, dims, raw = _tuple(call.argument(1)), _tuple(shifts), _tuple(dims), call.args[0]
    if not dims:
        flat = reshape(x, (x.aval.numel,))
        return reshape(_rolled(flat, 0, _rolled_from(flat.shape[0], shifts[0], raw.numel(), given[0])), x.shape)
    for shift, dim, asked in zip(shifts, dims, given, strict=True):
        x = _rolled(x, dim % x.ndim, _rolled_from(x.shape[dim], shift, raw.shape[dim], asked))
    return x


def _rolled_from(size: Size, shift: Size, length: Any, asked: Any) -> Size:
    """The place that comes first, (size - shift) % size.

    length, asked: size and shift as torch gave them. A guard says that no remainder is needed, where none is.
    """
    if size == 0:
        return 0
    if bool(asked >= 0) and bool(asked <= length):
        return simplify_size(sympy.sympify(size) - shift)
    if bool(asked <= 0) and bool(-asked <= length):
        return simplify_size(-sympy.sympify(shift))
    return simplify_size((size - shift) % size)


def _rolled(x: Value, axis: int, first: Size) -> Value:
    size = x.shape[axis]
    return x if first in (0, size) else emit("cat", cut(x, axis, first, size), cut(x, axis, 0, first), axis=axis)


def _tuple(item: Any) -> tuple[Any, ...]:
    return tuple(item) if isinstance(item, (list, tuple)) else (item,)


# ---------------------------------------------------------------------------------------------- slices
def _first(call: Call, argument: int, axis: int, start: Any) -> Size:
    """Where a slice begins: negative from the end, clipped to the axis, by guards that the fake result has set."""
    size = call.args[0].shape[axis]
    start = 0 if start is None else start
    start = start + size if start < 0 else start
    start = 0 if start < 0 else size if start > size else start
    return call.sizes(start)


def _span(call: Call, axis: int, start: Any, length: Size, step: int) -> tuple[Size, Size]:
    first = _first(call, 2, axis, start)
    return first, first if length == 0 else simplify_size(first + (length - 1) * step + 1)


@rule("slice.Tensor slice_copy.Tensor")
def _slice(call: Call, x: Value, dim: int = 0, *_: Any, step: int = 1, **__: Any) -> Result:
    axis, step = dim % x.ndim, call.argument(4, step)
    size, start = call.out.shape[axis], call.argument(2) or 0
    is_phase = step > 1 and isinstance(start, int) and 0 <= start < step
    if is_phase and sizes_equal(simplify_size(size * step), x.shape[axis]):
        return _phase(x, axis, size, step, start)
    first, last = _span(call, axis, call.argument(2), size, step)
    return cut(x, axis, first, last, step)


def _phase(x: Value, axis: int, size: Size, step: int, first: int) -> Value:
    """x[first::step] of an axis that step divides: one column of (size, step), whatever the size."""
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    column = cut(reshape(x, (*before, size, step, *after)), axis + 1, first, first + 1)
    return reshape(column, (*before, size, *after))


@rule("view.dtype")
def _view_dtype(call: Call, x: Value, dtype: Any) -> Result:
    """Integers of one width, read with and without sign: what a conversion between them does."""
    target = call.out.dtype
    integers = {target, x.dtype} <= set(INTEGERS) and ITEMSIZE[target] == ITEMSIZE[x.dtype]
    return cast(x, target) if integers else None


@rule("slice_scatter")
def _slice_scatter(call: Call, x: Value, source: Value, dim: int = 0, *_: Any, step: int = 1, **__: Any) -> Result:
    axis, step = dim % x.ndim, call.argument(5, step)
    _one_shape(call, axis)
    first, last = _span(call, axis, call.argument(3), source.shape[axis], step)
    return _overwrite(x, cast(source, x.dtype), axis, first, last, step)


def _one_shape(call: Call, axis: int, dropped: bool = False) -> None:
    """The source has the sizes of its place on the other axes: torch does not guard it."""
    target, source = list(call.args[0].shape), list(call.args[1].shape)
    del target[axis], source[axis : axis + (not dropped)]
    for a, b in zip(target, source, strict=True):
        call.agree(a, b)


def _overwrite(x: Value, source: Value, axis: int, first: Size, last: Size, step: int) -> Value:
    """x with x[first:last:step] = source, as a choice between the padded source and x."""
    if same_shape(source.shape, x.shape):
        return source
    behind = simplify_size(x.shape[axis] - last)
    inside = place(full(True, source.aval.with_dtype("b1")), axis, first, behind, step)
    return emit("where", inside, place(source, axis, first, behind, step), x)


@rule("select.int select_copy.int")
def _select(call: Call, x: Value, dim: int, index: Any) -> Result:
    axis = dim % x.ndim
    first = _first(call, 2, axis, call.args[2])
    return reshape(cut(x, axis, first, simplify_size(first + 1)), call.out.shape)


@rule("select_scatter")
def _select_scatter(call: Call, x: Value, source: Value, dim: int, index: Any) -> Result:
    axis = dim % x.ndim
    _one_shape(call, axis, dropped=True)
    first = _first(call, 3, axis, call.args[3])
    line = reshape(cast(source, x.dtype), (*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    return _overwrite(x, line, axis, first, simplify_size(first + 1), 1)


@rule(
    "split_with_sizes split.Tensor unsafe_split.Tensor unsafe_split_with_sizes split_with_sizes_copy split_copy.Tensor"
)
def _split(call: Call, x: Value, sizes: Any, dim: int = 0) -> Result:
    axis, at, parts = dim % x.ndim, 0, []
    _equal_parts(call, axis, sizes)
    for aval in call.outs:
        end = simplify_size(at + aval.shape[axis])
        parts.append(cut(x, axis, at, end))
        at = end
    return tuple(parts)


def _equal_parts(call: Call, axis: int, size: Any) -> None:
    """The last part of a `chunk` is as long as the others, by a guard, where it is so now: heads are made of such."""
    whole = call.args[0].shape[axis]
    if isinstance(size, sympy.Basic) and size.free_symbols <= getattr(call.sizes(whole), "free_symbols", set()):
        call.agree(call.argument(1) * len(call.outs), whole)


@rule("unbind.int unbind_copy.int")
def _unbind(call: Call, x: Value, dim: int = 0) -> Result:
    axis = dim % x.ndim
    return tuple(reshape(cut(x, axis, i, i + 1), aval.shape) for i, aval in enumerate(call.outs))


# ---------------------------------------------------------------------------------------------- joining, padding
@rule("cat")
def _cat(call: Call, xs: Sequence[Value], dim: int = 0) -> Result:
    """The one-dimensional empty tensor that torch lets pass among others is left out."""
    out = call.out
    _agree_on_parts(call, dim)
    parts = [cast(x, out.dtype) for x in xs if len(out.shape) == 1 or x.shape != (0,)]
    return emit("cat", *parts, axis=dim % len(out.shape)) if len(parts) > 1 else parts[0]


def _agree_on_parts(call: Call, dim: int) -> None:
    """Pieces of one length that are as long now are so from now on: n // 2 and n - n // 2 of an even n are halves."""
    lengths = [t.shape[dim] for t in call.argument(0) if t.ndim > 1]
    symbolic = [n for n in lengths if isinstance(n, torch.SymInt) and n.node.expr.has(FloorDiv)]
    for first, other in itertools.pairwise(symbolic):
        if first.node.expr.free_symbols == other.node.expr.free_symbols:
            call.agree(first, other)


@rule("stack")
def _stack(call: Call, xs: Sequence[Value], dim: int = 0) -> Result:
    axis = dim % len(call.out.shape)
    parts = [reshape(cast(x, call.out.dtype), (*x.shape[:axis], 1, *x.shape[axis:])) for x in xs]
    return emit("cat", *parts, axis=axis) if len(parts) > 1 else parts[0]


@rule("constant_pad_nd")
def _pad(call: Call, x: Value, pad: Sequence[Any], value: Any = 0) -> Result:
    """Negative amounts cut; another value than zero fills where a padded mask is false."""
    if not all(isinstance(p, int) or p.is_nonnegative or p.is_nonpositive for p in pad):
        return None
    amounts = {x.ndim - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2)}
    for axis, (lo, hi) in amounts.items():
        x = cut(x, axis, _above_zero(-lo), simplify_size(x.shape[axis] - _above_zero(-hi)))
    margins = [(_above_zero(lo), _above_zero(hi)) for lo, hi in (amounts.get(a, (0, 0)) for a in range(x.ndim))]
    lows, highs = (tuple(pair[side] for pair in margins) for side in (0, 1))
    if not any(lows + highs):
        return x
    padded = emit("pad", x, lo=lows, hi=highs, inner=(0,) * x.ndim)
    if value == 0:
        return padded
    inside = emit("pad", full(True, x.aval.with_dtype("b1")), lo=lows, hi=highs, inner=(0,) * x.ndim)
    return emit("where", inside, padded, full(value, padded.aval))


def _above_zero(n: Size) -> Size:
    """max(n, 0) of a number whose sign is known."""
    is_above = n > 0 if isinstance(n, int) else n.is_nonnegative
    return n if is_above else 0


@rule("repeat")
def _repeat(call: Call, x: Value, repeats: Sequence[Size]) -> Result:
    """(n,) -> (r, n) -> (r*n,), on every axis at once."""
    shape = (*(1,) * (len(repeats) - x.ndim), *x.shape)
    pairs = [part for r, n in zip(repeats, shape, strict=True) for part in (r, n)]
    if all(isinstance(r, int) and r == 1 for r in repeats):
        return reshape(x, shape)
    if all(sizes_equal(n, 1) for n in shape):
        return expand(reshape(x, shape), call.out.shape)
    spread = broadcast(reshape(x, shape), pairs, range(1, 2 * len(shape), 2))
    return reshape(spread, call.out.shape)


# ---------------------------------------------------------------------------------------------- diagonals, strides
@rule("diagonal diagonal_copy")
def _diagonal(call: Call, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Result:
    axes, index = _diagonal_index(x, call.out.shape[-1], offset, dim1, dim2)
    picked = emit("gather", x, *index, axes=axes)
    return permute(picked, (*range(1, picked.ndim), 0))


def _diagonal_index(
    x: Value, length: Size, offset: int, dim1: int, dim2: int
) -> tuple[tuple[int, int], list[Value]]:
    """The two axes of a diagonal, ascending, and the index along each."""
    rows, columns = dim1 % x.ndim, dim2 % x.ndim
    step = iota(length)
    index = [_shift(step, max(-offset, 0)), _shift(step, max(offset, 0))]
    return ((columns, rows), index[::-1]) if rows > columns else ((rows, columns), index)


def _shift(x: Value, by: int) -> Value:
    return x if by == 0 else emit("add", x, full(by, x.aval))


@rule("as_strided as_strided_copy")
def _as_strided(call: Call, x: Value, size: Sequence[Size], stride: Sequence[Size], offset: Any = None) -> Result:
    """Element at sum(i*stride): a gather from the flat tensor, which must be all of its memory, in order."""
    if not _is_whole_memory(call, x):
        raise LoweringError(
            f"`{call.op}` reads memory by strides, of a tensor that is not row-major or part of another"
        )
    if not offset and tuple(stride) == contiguous_strides(size) and sizes_equal(x.aval.numel, call.out.numel):
        return reshape(x, size)
    index = full(offset or 0, call.out.with_dtype("i64"))
    for axis, step in enumerate(stride):
        steps = emit("mul", iota(size[axis]), full(step, iota(size[axis]).aval))
        index = emit("add", index, broadcast(steps, call.out.shape, (axis,)))
    return emit("gather", reshape(x, (x.aval.numel,)), index, axes=(0,))


def _is_whole_memory(call: Call, x: Value) -> bool:
    fake = call.args[0]
    layout = tuple(_of_rows(call.sizes(s)) for s in fake.stride())
    if layout != contiguous_strides(x.shape) or fake.storage_offset() != 0:
        return False
    return sizes_equal(_of_rows(call.sizes(fake.untyped_storage().nbytes())), x.aval.nbytes)


def _of_rows(places: Size) -> Size:
    """max(1, n)  ->  n: how torch counts what lies between rows; of rows of nothing there is no element to read."""
    if not isinstance(places, sympy.Basic):
        return places
    return simplify_size(places.replace(sympy.Max, lambda *sizes: sympy.Max(*(n for n in sizes if n != 1))))


@rule("as_strided_scatter")
def _as_strided_scatter(
    call: Call, x: Value, source: Value, size: Sequence[Size], stride: Sequence[Size], offset: Any = None
) -> Result:
    """One number along the diagonal of a matrix, as `fill_diagonal_` writes it: a choice by rows and columns."""
    number = number_of(source)
    is_line = x.ndim == 2 and len(size) == 1 and not offset and _is_whole_memory(call, x)
    if number is None or not is_line or not sizes_equal(stride[0], x.shape[1] + 1):
        return None
    if not any(sizes_equal(size[0], n) for n in x.shape):
        return None
    rows, columns = (broadcast(iota(n), x.shape, (axis,)) for axis, n in enumerate(x.shape))
    return emit("where", emit("eq", rows, columns), full(number, x.aval), x)


@rule("unfold")
def _unfold(call: Call, x: Value, dim: int, size: int, step: int) -> Result:
    """Windows along an axis: gather at window*step + position, the position last."""
    axis = dim % x.ndim if x.ndim else 0
    if not x.ndim:
        return reshape(x, call.out.shape)
    windows = (call.out.shape[axis], size)
    starts = emit("mul", iota(windows[0]), full(step, iota(windows[0]).aval))
    index = emit("add", broadcast(starts, windows, (0,)), broadcast(iota(size), windows, (1,)))
    picked = emit("gather", x, index, axes=(axis,))
    other_axes = range(2, picked.ndim)
    return permute(picked, (*other_axes[:axis], 0, *other_axes[axis:], 1))


@rule("tril triu")
def _triangle(call: Call, x: Value, diagonal: Any = 0) -> Result:
    rows, columns = (broadcast(iota(x.shape[a]), x.shape, (a,)) for a in (x.ndim - 2, x.ndim - 1))
    edge = emit("add", rows, fit(diagonal, rows.aval)) if diagonal != 0 else rows
    keep = emit("le" if call.name == "tril" else "ge", columns, edge)
    return emit("where", keep, x, full(0, x.aval))


@rule("diagonal_scatter")
def _diagonal_scatter(call: Call, x: Value, source: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Result:
    """A choice by rows and columns, of which kernels make a tile as of others; with a shift a write by an index."""
    axes, index = _diagonal_index(x, source.shape[-1], offset, dim1, dim2)
    source = cast(source, x.dtype)
    if not offset and call.agree(*(call.args[0].shape[a] for a in axes)):
        rows, columns = (broadcast(iota(x.shape[a]), x.shape, (a,)) for a in axes)
        kept = [a for a in range(x.ndim) if a != axes[1]]
        places = [a for a in kept if a != axes[0]] + [axes[0]]
        spread = broadcast(permute(source, [places.index(a) for a in kept]), x.shape, kept)
        return emit("where", emit("eq", rows, columns), spread, x)
    lines = permute(source, (source.ndim - 1, *range(source.ndim - 1)))
    return emit("scatter", x, lines, *index, axes=axes, mode="set")
