"""Writes to a buffer, one slice after another, `out[t] = h`, or one block: `out[4 * t : 4 * t + 4] = h`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ...sizes import hint_of
from ..program import Ref, Step
from .rewriting import UNWRITTEN, WRITES, Rewriting, Write, aten, chained, selected, slice_of, sliced, stacked


# ---------------------------------------------------------------------- what is read of a buffer
def _select(r: Rewriting, step: Step) -> Ref | None:
    buffer, dim, index = r.named(step.leaves[0]), *r.axis_and_index(step, 0)
    while (write := r.writes.get(buffer)) is not None and (write.dim, write.span) == (dim, None):
        if write.index == index:
            return r.laid_out(step, write.slice)
        buffer = write.buffer
    return r.add(_replaced(step, [r.put_together(buffer), *step.leaves[1:]]))


def _slice(r: Rewriting, step: Step) -> Ref | None:
    """A slice from end to end is what it is taken of, where that is written to: `out[:, t] = h`; a block that was
    written, what was written."""
    if (block := _block(r, step, 0)) is None:
        return None
    buffer, (dim, start, span) = r.named(step.leaves[0]), block
    if _covers(r, step, block):
        return buffer
    while (write := r.writes.get(buffer)) is not None and (write.dim, write.span) == (dim, span):
        if write.index == start:
            return r.laid_out(step, write.slice)
        if abs(write.index - start) < span:
            break
        buffer = write.buffer
    return r.add(_replaced(step, [r.put_together(buffer), *step.leaves[1:]]))


def _slice_scattered(r: Rewriting, step: Step) -> Ref | None:
    """What is written from end to end is what there is from then on."""
    if (block := _block(r, step, 1)) is None:
        return None
    source, value = r.named(step.leaves[0]), r.named(step.leaves[1])
    if _covers(r, step, block):
        return r.laid_out(step, value) if r.kind(source) == r.kind(value) else None
    made = r.add(_replaced(step, [source, value, *step.leaves[2:]]))
    r.writes[made] = Write(source, value, *block)
    return made


def _block(r: Rewriting, step: Step, tensors: int) -> tuple[int, int, int] | None:
    """Axis, first place and number of places of a slice, where these are numbers and side by side."""
    dim, start, stop, stride = slice_of(step.leaves[tensors + 1 :])
    if dim is None or start is None or stop is None or stride != 1:
        return None
    shape = r.source_value(step.leaves[0]).shape
    size = hint_of(shape[dim])
    first, end, _ = slice(start, stop).indices(size)
    return (dim % len(shape), first, end - first) if first < end else None


def _covers(r: Rewriting, step: Step, block: tuple[int, int, int]) -> bool:
    """Whether a slice has all places of its axis."""
    dim, start, span = block
    return start == 0 and span == hint_of(r.source_value(step.leaves[0]).shape[dim])


def _copy(r: Rewriting, step: Step) -> Ref | None:
    """A copy to a place of the same kind is what is copied."""
    place, value = (r.named(leaf) if isinstance(leaf, Ref) else None for leaf in step.leaves[:2])
    same = place is not None and value is not None and r.kind(place) is not None and r.kind(place) == r.kind(value)
    return r.laid_out(step, value) if same and value is not None else None


def _scatter(r: Rewriting, step: Step) -> Ref | None:
    buffer, value = r.named(step.leaves[0]), r.named(step.leaves[1])
    dim, index = r.axis_and_index(step, 1)
    made = r.add(_replaced(step, [buffer, value, *step.leaves[2:]]))
    r.writes[made] = Write(buffer, value, dim, index)
    return made


def _detach(r: Rewriting, step: Step) -> Ref | None:
    """A value of the method's own, detached, is that value."""
    value = r.named(step.leaves[0])
    return value if value.step >= 0 else None


# ---------------------------------------------------------------------- what a buffer is in the end
def put_writes_together(r: Rewriting, buffer: Ref) -> Ref | None:
    """A buffer that was filled is the stack of its slices, or its blocks one behind the other."""
    if buffer not in r.writes:
        return None
    dim, span = r.writes[buffer].dim, r.writes[buffer].span
    slices, below = _slices_of(r, buffer)
    step = r.steps[buffer.step]
    places = range(0, hint_of(step.value.shape[dim]), span or 1)
    missing = [i for i in places if i not in slices]
    if len(slices) < WRITES or len(missing) > UNWRITTEN or not _are_side_by_side(slices, places):
        return None
    if span is None:
        slices |= {i: r.add(selected(step, below, dim, i)) for i in missing}
        return r.add(stacked(step, [r.put_together(slices[i]) for i in places], dim))
    slices |= {i: r.add(sliced(step, below, dim, i, span)) for i in missing}
    return r.add(chained(step, [r.put_together(slices[i]) for i in places], dim))


def _are_side_by_side(slices: Collection[int], places: range) -> bool:
    """Whether each begins at one of these places, and the last of them ends with the axis."""
    return places.stop % places.step == 0 and all(i in places for i in slices)


def _slices_of(r: Rewriting, buffer: Ref) -> tuple[dict[int, Ref], Ref]:
    """The newest slice at each index of those that are alike, and what the buffer was before."""
    slices: dict[int, Ref] = {}
    newest = r.writes[buffer]
    while (write := r.writes.get(buffer)) is not None and (write.dim, write.span) == (newest.dim, newest.span):
        slices.setdefault(write.index, write.slice)
        buffer = write.buffer
    return slices, buffer


def _replaced(step: Step, leaves: list[Any]) -> Step:
    return Step(step.target, step.form, leaves, step.token, step.meta, step.value)


WRITTEN: dict[Any, Any] = {
    aten.select.int: _select,
    aten.copy.default: _copy,
    aten.select_scatter.default: _scatter,
    aten.detach.default: _detach,
    aten.slice.Tensor: _slice,
    aten.slice_scatter.default: _slice_scattered,
}
