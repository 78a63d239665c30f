"""Gradients that are zero but for one place, and their sums: what autograd makes where a loop reads `x[t]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...sizes import hint_of
from ..program import Ref, Step
from .rewriting import (
    UNWRITTEN,
    WRITES,
    Place,
    Places,
    Rewriting,
    aten,
    like,
    number,
    plain,
    selected,
    slice_of,
    stacked,
    zeros,
)


# ---------------------------------------------------------------------- zeros but for some places
def _place(r: Rewriting, step: Step) -> Ref | None:
    dim, index = map(plain, step.leaves[-2:])
    if dim is None or index is None:
        return None
    dim %= step.value.ndim
    return _noted(r, step, dim, {index % hint_of(step.value.shape[dim]): Place(r.named(step.leaves[0]))})


def _window(r: Rewriting, step: Step) -> Ref | None:
    """The gradient of a slice: of one from end to end it is what it is; of a narrow one, each of its places."""
    dim, start, stop, stride = slice_of(step.leaves[1 + step.value.ndim :])
    if dim is None or start is None or stop is None or stride is None:
        return None
    size = hint_of(step.value.shape[dim])
    indices = range(size)[start:stop:stride]
    if len(indices) == size:
        return r.named(step.leaves[0])
    if not 0 < 2 * len(indices) < size:
        return None
    slices = [r.add(selected(step, r.whole(step.leaves[0]), dim, i)) for i in range(len(indices))]
    return _noted(r, step, dim % step.value.ndim, dict(zip(indices, map(Place, slices), strict=True)))


def _noted(r: Rewriting, step: Step, dim: int, at: Mapping[int, Place]) -> Ref:
    made = r.as_it_is(step)
    r.placed[made] = Places(step, dim, at, len(at))
    return made


# ---------------------------------------------------------------------- sums of them
def _sum(r: Rewriting, step: Step) -> Ref | None:
    if len(step.leaves) != 2 or not all(isinstance(leaf, Ref) for leaf in step.leaves):
        return None
    return _summed(r, step, *map(r.named, step.leaves))


def _summed(r: Rewriting, step: Step, a: Ref, b: Ref) -> Ref | None:
    """The sum of two, one of which at least is known by its places."""
    first, second = r.placed.get(a), r.placed.get(b)
    if (first is None and second is None) or r.kind(a) != r.kind(b):
        return None
    if first is not None and second is not None and first.dim == second.dim:
        places = _merged(r, step, first, second)
    elif second is None or (first is not None and first.number > second.number):
        assert first is not None
        b = r.put_together(b)
        places = _with_whole(r, step, first, b)
    else:
        a = r.put_together(a)
        places = _with_whole(r, step, second, a)
    made = r.add(replace(step, leaves=[a, b]))
    r.placed[made] = places
    return made


def _merged(r: Rewriting, step: Step, first: Places, second: Places) -> Places:
    if first.whole is not None and second.whole is not None:
        second = _spread(r, step, second)
    if second.whole is not None:
        first, second = second, first
    at = dict(first.at)
    for index, place in second.at.items():
        at[index] = _added(r, step, first, index, place.value)
    return replace(first, at=at, number=first.number + second.number)


def _added(r: Rewriting, step: Step, places: Places, index: int, value: Ref) -> Place:
    """What is at a place once one value more is added: after what was added of all places, in eager's order."""
    if (place := places.at.get(index)) is None:
        return Place(value)
    if places.whole is None or place.has_whole:
        return Place(_plus(r, step, place.value, value), place.has_whole)
    return Place(_plus(r, step, _all_at(r, step, places, index), value), True)


def _all_at(r: Rewriting, step: Step, places: Places, index: int) -> Ref:
    """What is at one place of a sum that something with all places is a part of."""
    assert places.whole is not None
    place = places.at.get(index)
    if place is not None and place.has_whole:
        return place.value
    part = r.add(selected(step, places.whole, places.dim, index))
    return part if place is None else _plus(r, step, place.value, part)


def _with_whole(r: Rewriting, step: Step, places: Places, whole: Ref) -> Places:
    """The places with something added that has all of them."""
    spread = places if places.whole is None else _spread(r, step, places)
    return replace(spread, at={i: Place(p.value) for i, p in spread.at.items()}, whole=whole)


def _spread(r: Rewriting, step: Step, places: Places) -> Places:
    """The same sum by its places alone."""
    size = hint_of(step.value.shape[places.dim])
    return replace(places, at={i: Place(_all_at(r, step, places, i)) for i in range(size)}, whole=None)


def _plus(r: Rewriting, step: Step, a: Ref, b: Ref) -> Ref:
    one = like(step, aten.add.Tensor, [a, b], r.value(a))
    found = _summed(r, one, a, b)
    return r.add(replace(one, leaves=[r.put_together(a), r.put_together(b)])) if found is None else found


# ---------------------------------------------------------------------- what a sum is in the end
def put_places_together(r: Rewriting, total: Ref) -> Ref | None:
    """A sum of places is the stack of what is at each; one of a few places is put there once."""
    if (places := r.placed.get(total)) is None:
        return None
    step = r.steps[total.step]
    if len(places.at) < WRITES:
        return _put_there(r, step, places)
    if any(place.has_whole for place in places.at.values()):
        places = _spread(r, step, places)
    size = hint_of(step.value.shape[places.dim])
    if size - len(places.at) > UNWRITTEN:
        return None
    return _and_zero(r, step, places, r.add(stacked(step, _slices(r, step, places, size), places.dim)))


def _slices(r: Rewriting, step: Step, places: Places, size: int) -> list[Ref]:
    some = next(iter(places.at.values())).value
    missing = {i: r.add(zeros(step, some, r.value(some))) for i in range(size) if i not in places.at}
    return [missing[i] if i in missing else r.put_together(places.at[i].value) for i in range(size)]


def _put_there(r: Rewriting, step: Step, places: Places) -> Ref | None:
    """Many tensors at few places are added up first."""
    is_select = places.model.target is aten.select_backward.default
    if places.number < WRITES or not is_select or any(place.has_whole for place in places.at.values()):
        return None
    total: Ref | None = None
    for index, place in places.at.items():
        leaves = [r.put_together(place.value), *places.model.leaves[1:-2], number(places.dim), number(index)]
        one = r.add(replace(places.model, leaves=leaves, value=step.value))
        total = one if total is None else r.add(like(step, aten.add.Tensor, [total, one], step.value))
    assert total is not None
    return _and_zero(r, step, places, total)


def _and_zero(r: Rewriting, step: Step, places: Places, total: Ref) -> Ref:
    """And 0, which each place has from the others: it has no -0.0."""
    if places.whole is not None:
        total = r.add(like(step, aten.add.Tensor, [places.whole, total], step.value))
    return r.add(like(step, aten.add.Scalar, [total, number(0)], step.value))


SPREAD: dict[Any, Any] = {aten.select_backward.default: _place, aten.slice_backward.default: _window}
PLACED: dict[Any, Any] = {**SPREAD, aten.add.Tensor: _sum}
