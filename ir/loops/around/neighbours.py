"""Steps beside their neighbours: what a step reads of the one before it is carried to it.

    cat(0, ys) - cat(ys, 0)    ->    ds = what is carried from the step before;  cat(ds, last) - cat(ys, 0)
    ys[1:] - ys[:-1]           ->    ys[1:] - ds[1:]

Otherwise all steps would have to be in memory before the first of these can be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ...graph import Graph, Value, emit
from ...infer import sizes_equal
from ...passes.pieces import Pieces
from ...prims import PRIMS
from ...rewrite import make
from ...switches import is_on
from ...transforms.ops import zeros
from ...types import Size, TensorType, simplify_size
from ..loop import below, scans_of
from ..parts import piece
from ..tidy import TidyLoops, in_bodies
from .carrying import Carrying, carried_along
from .made import Made

MOST = 2
"""Steps from one to a neighbour of it."""


@dataclass(frozen=True)
class Neighbours:
    """Graph -> an equal graph whose loops carry to a step what is read of those before it."""

    def __call__(self, graph: Graph) -> Graph:
        if not is_on("neighbours") or not scans_of(graph):
            return graph
        graph = before = in_bodies(graph, self)
        while (found := next(_found(graph), None)) is not None:
            graph = Pieces()(carried_along(graph, {found.scan.id: [found]}))
        return graph if graph is before else TidyLoops()(graph)


def _found(graph: Graph) -> Iterator[_Late]:
    """Nodes that read steps of a loop beside earlier ones."""
    nodes = [v for v in graph.order() if PRIMS[v.prim].family == "elementwise" and len(v.args) > 1]
    for scan in scans_of(graph) if nodes else []:
        later = frozenset(below(graph, [scan]))
        for node in (v for v in nodes if v.id in later):
            args = [a for a in dict.fromkeys(node.args) if a.id in later]
            found = (_late(args, axis, scan, later) for axis in range(node.ndim if len(args) > 1 else 0))
            yield from (_Late(node, scan, delayed) for delayed in found if delayed)


def _late(args: Sequence[Value], axis: int, scan: Value, later: frozenset[int]) -> tuple[_Delayed, ...]:
    """The operands that are behind others, if all go together once they are carried."""
    runs = [r for a in args if (r := _Run.of(a, axis, scan, later)) is not None]
    shifts = [r.shift for r in runs if isinstance(r.shift, int)]
    if not 1 < len(args) == len(shifts):
        return ()
    delayed = [_Delayed(a, r, _delay(r.shift, shifts, scan)) for a, r in zip(args, runs, strict=True)]
    sizes = [d.sizes for d in delayed]
    is_possible = all(d.is_possible for d in delayed) and all(_are_alike(sizes[0], s) for s in sizes)
    return tuple(delayed) if is_possible and any(d.by > 0 for d in delayed) else ()


def _delay(shift: Size, shifts: Sequence[int], scan: Value) -> int:
    """Steps from a place along an operand to the step at which the last of all operands has it."""
    return int(max(shifts) - shift if scan.params["reverse"] else shift - min(shifts))


def _are_alike(one: Sequence[Size], other: Sequence[Size]) -> bool:
    return len(one) == len(other) and all(map(sizes_equal, one, other))


@dataclass(frozen=True)
class _Late:
    """A node of operands that are steps of a loop: all are made of the steps at which the last of them is there."""

    node: Value
    scan: Value
    delayed: tuple[_Delayed, ...]

    @property
    def outside(self) -> list[Value]:
        return [v for d in self.delayed if d.by > 0 for v in d.outside]

    def carry(self, carrying: Carrying, env: Mapping[int, Any]) -> Callable[[], Value]:
        made = {d.value.id: d.carry(carrying, env) for d in self.delayed}

        def node() -> Value:
            args = (made[a.id]() if a.id in made else env[a.id] for a in self.node.args)
            return emit(self.node.prim, *args, **self.node.params)

        return node


class _Piece(NamedTuple):
    """Places `start` .. `stop` of a value, along an axis."""

    value: Value
    start: Size
    stop: Size

    @property
    def size(self) -> Size:
        return simplify_size(self.stop - self.start)


@dataclass(frozen=True)
class _Run:
    """Steps `start` .. `stop` of what is made of a loop's steps, between what a concatenation has before and behind."""

    made: Made
    start: Size
    stop: Size
    before: tuple[_Piece, ...]
    behind: tuple[_Piece, ...]

    @staticmethod
    def of(value: Value, axis: int, scan: Value, later: frozenset[int]) -> _Run | None:
        pieces, length = _pieces(value, axis), scan.params["length"]
        for number, (steps, start, stop) in enumerate(pieces):
            made = Made(steps, axis, scan, later)
            if steps.id in later and sizes_equal(steps.shape[axis], length) and made.is_possible:
                return _Run(made, start, stop, tuple(pieces[:number]), tuple(pieces[number + 1 :]))
        return None

    @property
    def shift(self) -> Size:
        """The place at which its first step is, or would be."""
        return simplify_size(sum((p.size for p in self.before), start=-self.start))


def _pieces(value: Value, axis: int) -> list[_Piece]:
    """What a value is put together of, along an axis; none where that is not known."""
    whole = _sliced(value, axis)
    if whole.value.prim != "cat" or whole.value.params["axis"] != axis:
        return [whole]
    behind = simplify_size(whole.value.shape[axis] - whole.stop)
    return _without_ends([_sliced(p, axis) for p in whole.value.args], whole.start, behind)


def _without_ends(pieces: list[_Piece], first: Size, last: Size) -> list[_Piece]:
    """The pieces without so many places; none where it is not known how many that are."""
    if not isinstance(first, int) or not isinstance(last, int):
        return []
    return [p for p in _cut(_cut(pieces, first)[::-1], last, is_end=True)[::-1] if p.size != 0]


def _cut(pieces: list[_Piece], count: int, is_end: bool = False) -> list[_Piece]:
    """Without the first places."""
    found = list[_Piece]()
    for value, start, stop in pieces:
        size = simplify_size(stop - start)
        less = min(count, size) if isinstance(size, int) else count
        ends = (start, stop - less) if is_end else (start + less, stop)
        found.append(_Piece(value, *map(simplify_size, ends)))
        count -= less
    return found


def _sliced(value: Value, axis: int) -> _Piece:
    """What a value is of, if it is a slice along this axis alone."""
    itself = _Piece(value, 0, value.shape[axis])
    if value.prim != "slice" or any(n != 1 for n in value.params["step"]):
        return itself
    (whole,) = value.args
    others = (d for d in range(value.ndim) if d != axis)
    is_along = all(sizes_equal(value.shape[d], whole.shape[d]) for d in others)
    return _Piece(whole, value.params["start"][axis], value.params["stop"][axis]) if is_along else itself


@dataclass(frozen=True)
class _Delayed:
    """A value whose steps are given by so many later steps of their loop.

    In the order of the loop: state m is what was made m steps before; `near` and `far` are steps of the loop before and
    behind those that the value has.
    """

    value: Value
    run: _Run
    by: int

    @property
    def _axis(self) -> int:
        return self.run.made.axis

    @property
    def _is_reversed(self) -> bool:
        return bool(self.run.made.scan.params["reverse"])

    @property
    def _length(self) -> Size:
        return self.run.made.value.shape[self._axis]

    @property
    def _near(self) -> Size:
        return simplify_size(self._length - self.run.stop) if self._is_reversed else self.run.start

    @property
    def _far(self) -> Size:
        return self.run.start if self._is_reversed else simplify_size(self._length - self.run.stop)

    @property
    def _first(self) -> _Piece | None:
        """The piece whose rows the states begin with, where the value goes on from it."""
        pieces = self.run.behind[:1] if self._is_reversed else self.run.before[-1:]
        return pieces[0] if pieces and self._near == 0 else None

    @property
    def is_possible(self) -> bool:
        if self.by > MOST or not all(isinstance(n, int) and n >= 0 for n in (self._far, self._near)):
            return False
        first, later = self._first, self.run.made.later
        size = self.by if first is None else first.size
        return isinstance(size, int) and size >= self.by and (first is None or first.value.id not in later)

    @property
    def _carried(self) -> int:
        """Rows that are states in the end."""
        return max(0, self.by - int(self._far))

    @property
    def _steps(self) -> tuple[Size, Size]:
        """From where to where along the loop's steps the value is, as these lie in memory."""
        length = self._length
        start = 0 if self._first is not None else int(self._near) + self.by
        behind = max(0, int(self._far) - self.by)
        ends = (behind, start) if self._is_reversed else (start, behind)
        return ends[0], simplify_size(length - ends[1])

    @property
    def sizes(self) -> list[Size]:
        """Of its pieces, once it is made of later steps."""
        start, stop = self._steps
        around = [[p.size for p in pieces] for pieces in (self.run.before, self.run.behind)]
        if self._first is not None:
            around[self._is_reversed][0 if self._is_reversed else -1] -= self.by
        carried = [self._carried]
        own = [*carried * self._is_reversed, simplify_size(stop - start), *carried * (not self._is_reversed)]
        return [n for n in (*around[0], *own, *around[1]) if n != 0]

    # ------------------------------------------------------------------ carried
    @property
    def outside(self) -> list[Value]:
        return [*self.run.made.outside, *([] if self._first is None else [self._first.value])]

    def carry(self, carrying: Carrying, env: Mapping[int, Any]) -> Callable[[], Value]:
        """Each state hands on what the one before it has."""
        if self.by == 0:
            return lambda: self._whole(env[self.run.made.value.id], [], env)
        operands, before = self.run.made.operands(carrying, env), list[Value]()

        def update(state: Value) -> Value:
            before.append(state)
            return before[-2] if len(before) > 1 else self.run.made.in_step(carrying, operands)

        numbers = [carrying.carry(self._start(env, back), update) for back in range(1, self.by + 1)]
        given = carrying.give(before[-1])
        axis = self._axis
        perm = tuple(0 if d == axis else d + (d < axis) for d in range(self.value.ndim))
        turned = partial(make, "permute", perm=perm)
        return lambda: self._whole(turned(carrying.stacks[given]), [carrying.ends[n] for n in numbers], env)

    def _start(self, env: Mapping[int, Any], back: int) -> Value:
        """What so many steps before the first one there is."""
        shape = self.run.made.shape
        if self._first is None:
            return zeros(TensorType(shape, self.value.dtype))
        value, start, stop = self._first
        at = simplify_size(start + back - 1 if self._is_reversed else stop - back)
        return make("reshape", piece(env[value.id], self._axis, at, simplify_size(at + 1)), shape=shape)

    def _whole(self, steps: Value, states: Sequence[Value], env: Mapping[int, Any]) -> Value:
        """The value, made of what steps of the loop have of it."""
        axis, steps = self._axis, self._part(steps, *self._steps)
        ends = [self._row(s) for s in states[self.by - self._carried :]]
        before, behind = list(self.run.before), list(self.run.behind)
        if self._first is not None:  # without the rows that the states begin with
            before = before if self._is_reversed else _cut(before[::-1], self.by, is_end=True)[::-1]
            behind = _cut(behind, self.by) if self._is_reversed else behind
        around = ([self._part(env[p.value.id], p.start, p.stop) for p in kept] for kept in (before, behind))
        first, last = ([p for p in kept if p.shape[axis] != 0] for kept in around)
        own = [*ends, steps] if self._is_reversed else [steps, *reversed(ends)]
        pieces = [*first, *own, *last]
        return emit("cat", *pieces, axis=axis) if len(pieces) > 1 else pieces[0]

    def _part(self, value: Value, start: Size, stop: Size) -> Value:
        is_whole = start == 0 and sizes_equal(stop, value.shape[self._axis])
        return value if is_whole else piece(value, self._axis, start, stop)

    def _row(self, state: Value) -> Value:
        shape = state.shape
        return make("reshape", state, shape=(*shape[: self._axis], 1, *shape[self._axis :]))
