"""Writes to a buffer, one slice after another: `out[t] = h`."""

from __future__ import annotations

from typing import Any

from ...sizes import hint_of
from ..program import Ref, Step
from .rewriting import UNWRITTEN, WRITES, Rewriting, Write, aten, selected, slice_of, stacked


# ---------------------------------------------------------------------- what is read of a buffer
def _select(r: Rewriting, step: Step) -> Ref | None:
    buffer, dim, index = r.named(step.leaves[0]), *r.axis_and_index(step, 0)
    while (write := r.writes.get(buffer)) is not None and write.dim == dim:
        if write.index == index:
            return r.laid_out(step, write.slice)
        buffer = write.buffer
    return r.add(_replaced(step, [r.put_together(buffer), *step.leaves[1:]]))


def _all_of(r: Rewriting, step: Step) -> Ref | None:
    """A slice from end to end is what it is taken of, where that is written to: `out[:, t] = h`."""
    return r.named(step.leaves[0]) if _covers(r, step, 0) else None


def _all_scattered(r: Rewriting, step: Step) -> Ref | None:
    """What is written from end to end is what there is from then on."""
    source, value = r.named(step.leaves[0]), r.named(step.leaves[1])
    return r.laid_out(step, value) if _covers(r, step, 1) and r.kind(source) == r.kind(value) else None


def _covers(r: Rewriting, step: Step, tensors: int) -> bool:
    """Whether a slice has all places of its axis."""
    dim, start, stop, stride = slice_of(step.leaves[tensors + 1 :])
    if start is None or stop is None:
        return False
    return (start, stride) == (0, 1) and stop >= hint_of(r.source_value(step.leaves[0]).shape[dim or 0])


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
    """A buffer that was filled is the stack of its slices."""
    slices, below, dim = _slices_of(r, buffer)
    if len(slices) < WRITES:
        return None
    step = r.steps[buffer.step]
    size = hint_of(step.value.shape[dim])
    missing = [i for i in range(size) if i not in slices]
    if len(missing) > UNWRITTEN:
        return None
    slices |= {i: r.add(selected(step, below, dim, i)) for i in missing}
    return r.add(stacked(step, [r.put_together(slices[i]) for i in range(size)], dim))


def _slices_of(r: Rewriting, buffer: Ref) -> tuple[dict[int, Ref], Ref, int]:
    """The newest slice at each index, what the buffer was before, and the axis."""
    slices: dict[int, Ref] = {}
    dim = r.writes[buffer].dim if buffer in r.writes else 0
    while (write := r.writes.get(buffer)) is not None and write.dim == dim:
        slices.setdefault(write.index, write.slice)
        buffer = write.buffer
    return slices, buffer, dim


def _replaced(step: Step, leaves: list[Any]) -> Step:
    return Step(step.target, step.form, leaves, step.token, step.meta, step.value)


WRITTEN: dict[Any, Any] = {
    aten.select.int: _select,
    aten.copy.default: _copy,
    aten.select_scatter.default: _scatter,
    aten.detach.default: _detach,
    aten.slice.Tensor: _all_of,
    aten.slice_scatter.default: _all_scattered,
}
