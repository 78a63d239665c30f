"""Axes that are joined into one: candidates in the order of what tells most, each pair of classes tried once.

A pair that did not fit never will, and one that did is one class: an item whose axes are in the classes of an earlier
one has nothing left to try. So the work is in the classes, not in the pairs of loads and stores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ...ir.types import Size
from ..kernel import Ref
from .axes import REDUCTIONS, Axis, Index, Sink, Term, axes_mentioned, terms_below
from .loops import REGISTERS
from .sizes import same, tidy


class Accessed(NamedTuple):
    """The axes of one load or store with their strides, by stride."""

    ref: Ref
    steps: tuple[tuple[Axis, Size], ...]

    @property
    def axes(self) -> list[Axis]:
        return [a for a, _ in self.steps]

    @property
    def strides(self) -> tuple[Size, ...]:
        return tuple(c for _, c in self.steps)

    @property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(tidy(a.size) for a in self.axes)

    def of_size(self, size: Size) -> Accessed:
        """The axes of one size."""
        return Accessed(self.ref, tuple(s for s, n in zip(self.steps, self.sizes, strict=True) if n == size))


class Joined:
    """Classes of axes: two may join unless some value varies along both. `beside`: the sets that an axis is in."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.terms = terms_below(t for s in sinks for t in s.terms)
        sets = dict.fromkeys(frozenset(s.axes) | s.value.axes | s.place.axes for s in sinks)
        sets |= dict.fromkeys(frozenset(axes_mentioned(t)) | _over(t) for t in self.terms)
        self.beside: dict[Axis, set[int]] = {}
        for number, axes in enumerate(sets):
            for axis in axes:
                self.beside.setdefault(axis, set()).add(number)
        self.axes = sorted(self.beside, key=lambda a: a.order)
        self.into: dict[Axis, Axis] = {}

    def find(self, axis: Axis) -> Axis:
        """The first axis of the class."""
        first = axis
        while first in self.into:
            first = self.into[first]
        while axis is not first:
            self.into[axis], axis = first, self.into[axis]
        return first

    def join_all(self, one: Sequence[Axis], two: Sequence[Axis]) -> None:
        """Join pairwise, all or none."""
        pairs = [(a, b) for a, b in zip(map(self.find, one), map(self.find, two), strict=True) if a is not b]
        if not all(same(a.size, b.size) for a, b in pairs) or not self._fit(pairs):
            return
        for a, b in pairs:
            self._join(self.find(a), self.find(b))

    def _fit(self, pairs: Sequence[tuple[Axis, Axis]]) -> bool:
        """No two axes that would be in one class are beside one another, or have an order of their own."""
        if any(a.turn or b.turn for a, b in pairs):
            return False
        classes: dict[Axis, list[Axis]] = {}
        for a, b in pairs:
            mine, other = classes.get(a, [a]), classes.get(b, [b])
            if mine is other:
                continue
            if not all(self.beside[x].isdisjoint(self.beside[y]) for x in mine for y in other):
                return False
            both = [*mine, *other]
            classes |= {axis: both for axis in both}
        return True

    def _join(self, a: Axis, b: Axis) -> None:
        if a is not b:
            keep, drop = sorted((a, b), key=lambda axis: axis.order)
            self.into[drop] = keep
            self.beside[keep] |= self.beside[drop]

    @property
    def count(self) -> int:
        return len(self.axes) - len(self.into)

    def mapping(self) -> dict[Axis, Index]:
        return {a: Index.over(self.find(a)) for a in self.axes if self.find(a) is not a}


def _over(term: Term) -> frozenset[Axis]:
    return term.args[0].axes if term.op in REDUCTIONS else frozenset()


def joined(sinks: Sequence[Sink]) -> Joined:
    """The classes that leave the fewest axes: first what is carried is read at its own place, or else what is in memory
    where its other readers read it, and what is carried along another axis."""
    terms = terms_below(t for s in sinks for t in s.terms)
    own = _carried_at_own_place(terms, sinks)
    in_memory = [at for at in _accessed(terms, sinks) if at.ref.kind not in REGISTERS]
    return min((_joined(sinks, first) for first in (own, in_memory)[: 1 + bool(own)]), key=lambda found: found.count)


def _joined(sinks: Sequence[Sink], first: Sequence[Accessed]) -> Joined:
    """Most telling first: these places, same buffer and place, same stride in it, same strides, same size."""
    classes = Joined(sinks)
    accessed = _accessed(classes.terms, sinks)
    _join_places(classes, first, True)
    for by_buffer in (True, False):
        _join_places(classes, accessed, by_buffer)
        for size in dict.fromkeys(n for at in accessed for n in at.sizes):
            _join_strides(classes, [at.of_size(size) for at in accessed if size in at.sizes], by_buffer)
    _join_sizes(classes)
    return classes


def _carried_at_own_place(terms: Sequence[Term], sinks: Iterable[Sink]) -> list[Accessed]:
    """What a loop carries where it is stored, and where it is read along no axis that is summed: before such ones, so
    that what one state reads of another is at its own place, and not where it is multiplied."""
    summed = {a for t in terms if t.op in REDUCTIONS for a in t.param}
    read = (t.param for t in terms if t.op == "load" and t.param.ref.kind == "state")
    places = [(s.ref, s.place) for s in sinks if s.ref.kind == "state"]
    places += [(access.ref, access.place) for access in read if summed.isdisjoint(access.place.walked)]
    return [Accessed(ref, _by_stride(place.terms)) for ref, place in dict.fromkeys(places)]


def _accessed(terms: Iterable[Term], sinks: Iterable[Sink]) -> list[Accessed]:
    """Every buffer with the axes that walk it, those of most axes first; then what is stored. What a loop carries is
    where it is stored: before all that reads it."""
    sinks = list(sinks)
    carried = [s for s in sinks if s.ref.kind == "state"]
    loads = sorted((t.param for t in terms if t.op == "load"), key=lambda access: -len(access.place.terms))
    walked = dict.fromkeys((x.ref, x.place.terms) for x in (*carried, *loads, *sinks))
    return [Accessed(ref, _by_stride(steps)) for ref, steps in walked]


def _by_stride(steps: Iterable[tuple[Axis, Size]]) -> tuple[tuple[Axis, Size], ...]:
    return tuple(sorted(steps, key=lambda t: (_written(t[1]), t[0].order)))


@functools.lru_cache(maxsize=1 << 12)
def _written(stride: Size) -> str:
    return str(stride)


def _pairs(
    items: Sequence[Accessed], alike: Callable[[Accessed], Hashable], known: Callable[[Accessed], Hashable]
) -> Iterator[tuple[Accessed, Accessed]]:
    """Pairs of items that are alike, in order; of items with the same classes (`known`) those of the first alone."""
    groups: dict[Hashable, list[Accessed]] = {}
    for item in items:
        groups.setdefault(alike(item), []).append(item)
    places, done = dict.fromkeys(groups, 0), set[Hashable]()
    for item in items:
        group = alike(item)
        places[group] += 1
        if (group, known(item)) not in done:
            yield from ((item, other) for other in groups[group][places[group] :])
            done.add((group, known(item)))


def _join_places(classes: Joined, items: Sequence[Accessed], by_buffer: bool) -> None:
    """Axis by axis where strides and sizes are the same."""
    known = lambda at: tuple(map(classes.find, at.axes))  # noqa: E731
    for one, two in _pairs(items, lambda at: (by_buffer and at.ref, at.strides, at.sizes), known):
        classes.join_all(one.axes, two.axes)


def _join_strides(classes: Joined, items: Sequence[Accessed], by_buffer: bool) -> None:
    """Single axes with the same stride, all of one size."""
    known = lambda at: tuple((classes.find(a), c) for a, c in at.steps)  # noqa: E731
    for one, two in _pairs(items, lambda at: by_buffer and at.ref, known):
        for a, b in ((a, b) for a, c in one.steps for b, d in two.steps if same(c, d)):
            classes.join_all([a], [b])


def _join_sizes(classes: Joined) -> None:
    """Axes of the same size, whatever they walk."""
    by_size: dict[Size, list[Axis]] = {}
    for axis in classes.axes:
        by_size.setdefault(tidy(axis.size), []).append(axis)
    for axes in by_size.values():
        # the first axis of a class comes before all others of it
        for number, axis in enumerate(axes):
            others = axes[number + 1 :] if classes.find(axis) is axis else []
            for other in (o for o in others if classes.find(o) is o):
                classes.join_all([axis], [other])
