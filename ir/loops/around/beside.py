"""Sums over time of what a loop reads step by step anyway are carried by it, too.

    (g * u).sum(0)  beside a loop that reads g and u      ->    total = total + g[t] * u[t] in each step
    the same beside one that reads g[1:] and u[1:]        ->    the sum of these, and g[0] * u[0]

Otherwise another kernel would read all of that again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ...graph import Graph, Value
from ...infer import sizes_equal
from ...passes.cost import estimate
from ...passes.layout import layout
from ...rewrite import make, nodes_between, rebuild
from ...switches import is_on
from ...types import FLOATS, LOW_FLOATS, Size, simplify_size
from ..loop import Loop, below, loop_of, scans_of
from ..parts import piece
from ..tidy import in_bodies
from .carrying import carried_along
from .made import MOST as MOST_MADE
from .made import Made, axis_before
from .sums import Summed

MOST = 8
"""States of a loop that takes one more."""
FEW = 3
"""First and last steps, at most, that a loop does not read."""


@dataclass(frozen=True)
class SummedBeside:
    """Graph -> an equal graph whose loops carry sums of what they read."""

    def __call__(self, graph: Graph) -> Graph:
        if not is_on("summed_steps") or not scans_of(graph):
            return graph
        graph = in_bodies(graph, self)
        while (found := next(_sums_beside(graph), None)) is not None:
            graph = found.in_pieces(graph) if found.is_longer else found.carried(graph)
        return graph


def _sums_beside(graph: Graph) -> Iterator[_Beside]:
    sums = [v for v in graph.order() if v.prim == "sum" and v.dtype in FLOATS]
    for scan in scans_of(graph) if sums else []:
        loop, later = loop_of(scan), below(graph, [scan])
        earlier = {v.id for v in nodes_between(scan.args, [v.id for v in graph.inputs])}
        apart = (v for v in sums if v.id not in later | earlier) if len(loop.init) < MOST else ()
        each = (_Beside(v, scan, loop, axis) for v in apart for axis in v.params["axes"])
        yield from (b for b in each if b.is_possible)


Reads: TypeAlias = dict[tuple[Value, int], list[tuple[Size, Size]]]
"""By value and axis: the runs of it that are the steps of a loop."""


class _Run(NamedTuple):
    """Places `start` .. `stop` of a value, along one of its axes."""

    value: Value
    axis: int
    start: Size
    stop: Size

    @staticmethod
    def of(value: Value, axis: int) -> _Run:
        """What all of a value is, along an axis, of what it is a part of."""
        start: Size = 0
        stop = value.shape[axis]
        while value.prim in ("permute", "slice") and (value.prim == "permute" or _is_part_along(value, axis)):
            if value.prim == "slice":
                first = value.params["start"][axis]
                start, stop = simplify_size(first + start), simplify_size(first + stop)
            axis = value.params["perm"][axis] if value.prim == "permute" else axis
            (value,) = value.args
        return _Run(value, axis, start, stop)


def _is_part_along(value: Value, axis: int) -> bool:
    """A slice takes all of the other axes."""
    others = (d for d in range(value.ndim) if d != axis)
    is_whole = all(sizes_equal(value.shape[d], value.args[0].shape[d]) for d in others)
    return is_whole and all(n == 1 for n in value.params["step"])


@dataclass(frozen=True)
class _Beside:
    """A sum over an axis that is the time of a loop; neither of the two is made of the other."""

    node: Value
    scan: Value
    loop: Loop
    axis: int

    @property
    def is_possible(self) -> bool:
        """It is of what the loop reads, no larger than that, and the few steps beside it are added as exactly."""
        (source,) = self.node.args
        largest = max((_of_step(x, 0) for x in self.loop.xs), default=0)
        if _of_step(source, self.axis) > largest or self.bounds is None:
            return False
        return not self.is_longer or self.node.dtype not in LOW_FLOATS

    @functools.cached_property
    def bounds(self) -> tuple[Size, Size] | None:
        """From where to where, along its axis, what it is of is a step of the loop; few places are beside that."""
        (source,) = self.node.args
        found = _bounds(source, self.axis, self._reads, set())
        size = source.shape[self.axis]
        return next((b for b in found or () if all(map(_is_few, (b[0], simplify_size(size - b[1]))))), None)

    @functools.cached_property
    def _reads(self) -> Reads:
        found: Reads = {}
        for run in (_Run.of(x, 0) for x in self.loop.xs):
            found.setdefault((run.value, run.axis), []).append((run.start, run.stop))
        return found

    @property
    def is_longer(self) -> bool:
        return bool(self._ends)

    @property
    def _ends(self) -> list[tuple[Size, Size]]:
        """First and last places that the loop does not read."""
        assert self.bounds is not None
        size, (start, stop) = self.node.args[0].shape[self.axis], self.bounds
        return [(a, b) for a, b in ((0, start), (stop, size)) if not sizes_equal(a, b)]

    # ------------------------------------------------------------------ the new graph
    def in_pieces(self, graph: Graph) -> Graph:
        """sum(x)  ->  sum(x[few:]) + sum(x[:few])"""
        return rebuild(graph, layout, {self.node.id: self._sum_of_pieces})

    def _sum_of_pieces(self, env: dict[int, Value]) -> Value:
        assert self.bounds is not None
        pieces = (_piece(self.node.args[0], self.axis, run, self._reads, env) for run in (self.bounds, *self._ends))
        sums = (make("sum", p, axes=self.node.params["axes"]) for p in pieces)
        return functools.reduce(lambda total, more: make("add", total, more), sums)

    def carried(self, graph: Graph) -> Graph:
        """The graph whose loop carries it."""
        made = set[int]()
        _bounds(self.node.args[0], self.axis, self._reads, made)
        steps = Made(self.node.args[0], self.axis, self.scan, frozenset(made))
        return carried_along(graph, {self.scan.id: [Summed(self.node, steps)]})


def _of_step(value: Value, axis: int) -> int:
    """Elements of one place along an axis."""
    return estimate(value.aval.numel) // max(1, estimate(value.shape[axis]))


def _is_few(size: Size) -> bool:
    return isinstance(size, int) and 0 <= size <= FEW


def _bounds(value: Value, axis: int, reads: Reads, made: set[int]) -> list[tuple[Size, Size]] | None:
    """Which places along an axis are steps that are read, if a value is made element by element of such; None: any.

    made: the ids of what it is made by.
    """
    run = _Run.of(value, axis)
    if (run.value, run.axis) in reads:
        own = reads[run.value, run.axis]
        return [(simplify_size(a - run.start), simplify_size(b - run.start)) for a, b in own]
    if _is_alike(value, axis):
        return None
    made.add(value.id)
    along = axis_before(value, axis)
    if along is None or not value.args or len(made) > MOST_MADE:
        return []
    found = [b for a in value.args if (b := _bounds(a, along, reads, made)) is not None]
    return [b for b in found[0] if all(b in others for others in found)] if found else None


def _is_alike(value: Value, axis: int) -> bool:
    """It is the same at all places along an axis."""
    return value.prim == "full" or (value.prim == "broadcast" and axis not in value.params["axes"])


def _piece(value: Value, axis: int, run: tuple[Size, Size], reads: Reads, env: Mapping[int, Value]) -> Value:
    """Some places along an axis, made of those of its operands."""
    known = _Run.of(value, axis)
    if (known.value, known.axis) in reads or _is_alike(value, axis):
        return piece(env[value.id], axis, *run)
    along, params = axis_before(value, axis), value.params
    assert along is not None
    if value.prim == "broadcast":
        size = simplify_size(run[1] - run[0])
        params = params | {"shape": (*value.shape[:axis], size, *value.shape[axis + 1 :])}
    return make(value.prim, *(_piece(a, along, run, reads, env) for a in value.args), **params)
