"""What a loop gives, or reads, but for first or last steps, is made and stored piece by piece, in its own kernel.

    exp(cat(h0, ys))                   ->  cat(exp(h0), exp(ys))         exp(ys) is stored as steps come
    v = exp(x), returned; v[1:] read   ->  cat(v[:1], ys)                ys: what each step reads of v, along any axis

Otherwise all steps would go through memory, or be made twice, by another kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..graph import Graph, Value, building, provenance
from ..infer import sizes_equal
from ..loops.around.carrying import BESIDE
from ..loops.around.walked import Walked
from ..loops.loop import loop_of, rebuild_scans, scans_of
from ..prims import PRIMS
from ..rewrite import join_rules, make, rebuild
from ..switches import is_on
from ..types import Size, simplify_size
from .layout import layout

READ = (*BESIDE, "gather")
"""Of what may be stored by the steps that read it."""
MOST = 4
"""Pieces: all but one are first or last steps by themselves."""
MOST_BESIDE = 32
"""Operations of what is read beside them."""


@dataclass(frozen=True)
class Pieces:
    """Graph -> an equal graph where what is made of concatenated steps is concatenated behind it."""

    def __call__(self, graph: Graph) -> Graph:
        if not is_on("pieces_of_loops") or not scans_of(graph):
            return graph
        divided = _Divided()
        rule = {p.name: (divided.by_pieces,) for p in PRIMS.values() if p.family == "elementwise"}
        rule["sum"] = (divided.sum_of_pieces,)
        return rebuild(graph, join_rules(rule, layout))


def given_by_steps(graph: Graph) -> Graph:
    """The graph whose loops give those of its results that their steps read."""
    given = _Given()
    return given.in_place(rebuild_scans(graph, given.by_steps)) if is_on("pieces_of_loops") else graph


class _Steps(NamedTuple):
    """A value as pieces along an axis, of which some are steps of a loop."""

    scan: int
    axis: int
    pieces: tuple[Value, ...]

    @property
    def sizes(self) -> list[Size]:
        return [p.shape[self.axis] for p in self.pieces]

    def is_like(self, other: _Steps | None) -> bool:
        """The same loop's steps and the same pieces."""
        if other is None or (self.scan, self.axis, len(self.pieces)) != (other.scan, other.axis, len(other.pieces)):
            return False
        return all(sizes_equal(n, m) for n, m in zip(self.sizes, other.sizes, strict=True))


class _Divided:
    """The rules."""

    def by_pieces(self, value: Value) -> Value | None:
        """f(cat(x, y), z)  ->  cat(f(x, z[first]), f(y, z[rest]))"""
        found = [self._steps(a) for a in value.args]
        steps = next((s for s in found if s is not None), None)
        if steps is None or not all(steps.is_like(s) or _is_beside(a) for a, s in zip(value.args, found, strict=True)):
            return None
        divided = [s.pieces if s else _sliced(a, steps) for a, s in zip(value.args, found, strict=True)]
        pieces = (make(value.prim, *args, **value.params) for args in zip(*divided, strict=True))
        return make("cat", *pieces, axis=steps.axis)

    def sum_of_pieces(self, value: Value) -> Value | None:
        """sum(cat(x, y))  ->  sum(x) + sum(y), where a loop carries its part along; or the sums of each step"""
        steps = self._steps(value.args[0])
        if steps is not None and steps.axis not in value.params["axes"]:
            return self.sums_of_steps(value, steps)
        if steps is None or value.dtype not in ("f32", "f64"):
            return None
        sums = (make("sum", p, axes=value.params["axes"]) for p in steps.pieces)
        return functools.reduce(lambda total, more: make("add", total, more), sums)

    def sums_of_steps(self, value: Value, steps: _Steps) -> Value:
        """sum(cat(x, y), 2)  ->  cat(sum(x, 2), sum(y, 2))"""
        axes = value.params["axes"]
        sums = (make("sum", p, axes=axes) for p in steps.pieces)
        return make("cat", *sums, axis=steps.axis - sum(a < steps.axis for a in axes))

    def _steps(self, value: Value) -> _Steps | None:
        if value.prim == "broadcast":
            return self._repeated(value)
        source, perm = (value.args[0], value.params["perm"]) if value.prim == "permute" else (value, None)
        if source.prim != "cat" or len(source.args) > MOST:
            return None
        axis = source.params["axis"]
        scans = {s for p in source.args if (s := scan_along(p, axis)) is not None}
        if len(scans) != 1:
            return None
        scan = scans.pop()
        if perm is None:
            return _Steps(scan, axis, source.args)
        return _Steps(scan, perm.index(axis), tuple(make("permute", p, perm=perm) for p in source.args))

    def _repeated(self, value: Value) -> _Steps | None:
        """The same along more axes."""
        (x,), axes = value.args, value.params["axes"]
        steps = self._steps(x)
        if steps is None or not sizes_equal(value.shape[axes[steps.axis]], x.shape[steps.axis]):
            return None
        axis = axes[steps.axis]
        sizes = ((*value.shape[:axis], n, *value.shape[axis + 1 :]) for n in steps.sizes)
        pieces = (make("broadcast", p, shape=s, axes=axes) for p, s in zip(steps.pieces, sizes, strict=True))
        return _Steps(steps.scan, axis, tuple(pieces))


def scan_along(value: Value, axis: int) -> int | None:
    """The loop whose steps a value has along an axis, or is made of element by element, or by sums in each step."""
    seen, todo = set[int](), [(value, axis)]
    while todo and len(seen) <= MOST_BESIDE:
        value, axis = todo.pop()
        scan = value.args[0] if value.prim == "pick" else value
        if value is not scan and scan.prim == "scan" and axis == 0 and value.params["index"] >= scan.params["carries"]:
            return scan.id
        is_along = value.prim in ALONG or PRIMS[value.prim].family == "elementwise"
        if is_along and value.id not in seen and (before := _axis_before(value, axis)) is not None:
            todo += [(a, before) for a in value.args]
        seen.add(value.id)
    return None


ALONG = ("permute", "broadcast", "slice", "sum")
"""Where an axis is what it was before, under another number."""


def _axis_before(value: Value, axis: int) -> int | None:
    """What an axis was before it was moved, or others summed; None where it is new."""
    if value.prim == "broadcast":
        axes: tuple[int, ...] = value.params["axes"]
        return axes.index(axis) if axis in axes else None
    if value.prim == "sum":
        return [a for a in range(value.args[0].ndim) if a not in value.params["axes"]][axis]
    return int(value.params["perm"][axis]) if value.prim == "permute" else axis


def _is_beside(value: Value, families: Collection[str] = BESIDE) -> bool:
    """It is made of inputs, element by element, in a few operations."""
    seen, todo = set[Value](), [value]
    while todo and len(seen) <= MOST_BESIDE:
        if (found := todo.pop()) not in seen:
            seen.add(found)
            todo += found.args
    return not todo and all(PRIMS[v.prim].family in families for v in seen)


class _Given:
    """Results of a graph that its loops give on the way: by what each is, what it is made of."""

    def __init__(self) -> None:
        self.made: dict[Value, Value] = {}

    def by_steps(self, scan: Value, args: list[Value]) -> list[Value] | None:
        """The results of a loop, whose steps give also what they read of results of the graph."""
        wanted, loop, count = set(map(_unmoved, scan.graph.results)), loop_of(scan, args), scan.params["carries"]
        xs = loop_of(scan).xs
        read = [at for at, x in enumerate(xs) if _is_most_of(x, wanted) and _is_beside(x, READ)]
        if not read:
            return None
        pairs = [list(zip(v, o, strict=True)) for v, o in zip(loop.inputs[1:], (loop.xs, loop.wholes), strict=True)]
        ys = [*loop.results[count:], *(loop.inputs.xs[at] for at in read)]
        made = loop.part(range(count), pairs[0], pairs[1], ys).emit()
        for at, steps in zip(read, made[len(loop.results) :], strict=True):
            walked = Walked.of(loop.xs[at])
            if walked.value not in self.made:
                with provenance(walked.value.origin):
                    self.made[walked.value] = walked.with_steps(steps)
        return made[: len(loop.results)]

    def in_place(self, graph: Graph) -> Graph:
        """The graph that returns these so."""
        with building(graph):
            outputs = [o if o is None else self._result(o) for o in graph.outputs]
        return graph.returning(outputs, graph.output_strides)

    def _result(self, output: Value) -> Value:
        if output.prim != "permute" or output in self.made:
            return self.made.get(output, output)
        x = self._result(output.args[0])
        return output if x == output.args[0] else make("permute", x, **output.params)


def _unmoved(value: Value) -> Value:
    """The same, but for the order of its axes."""
    return _unmoved(value.args[0]) if value.prim == "permute" else value


def _is_most_of(x: Value, results: Collection[Value]) -> bool:
    """One of these, or all of it but a few first or last steps; made by the graph."""
    walked = Walked.of(x)
    beside = [walked.start, simplify_size(walked.size - walked.start - x.shape[0])]
    is_made = walked.value in results and walked.value.prim != "input"
    return is_made and all(isinstance(n, int) for n in beside) and sum(beside) < MOST


def _sliced(value: Value, steps: _Steps) -> tuple[Value, ...]:
    """A value in pieces as long as those of the steps."""
    ends = list(accumulate(steps.sizes, lambda total, n: simplify_size(total + n)))
    return tuple(_part(value, steps.axis, start, stop) for start, stop in zip([0, *ends], ends, strict=False))


def _part(value: Value, axis: int, start: Size, stop: Size) -> Value:
    starts = tuple(start if a == axis else 0 for a in range(value.ndim))
    stops = tuple(stop if a == axis else n for a, n in enumerate(value.shape))
    return make("slice", value, start=starts, stop=stops, step=(1,) * value.ndim)
