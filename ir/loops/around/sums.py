"""Sums over the steps of a loop, of what it gives and what is made of that element by element, are carried along.

    (ys * w).sum(0)    ->    total = total + y * w in each step

Otherwise all steps would have to be in memory first, and another kernel would read them. So are sums of what a loop
reads step by step anyway (`beside`). Low floats are added in float32, and sums over more than the steps are taken behind
the loop. They are in another order than a sum of all steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...graph import Graph, Value, emit
from ...infer import drop_axes
from ...passes.cost import estimate
from ...prims import PRIMS
from ...switches import is_on
from ...transforms.ops import zeros
from ...types import FLOATS, LOW_FLOATS, TensorType
from ..loop import below, scans_of
from ..tidy import in_bodies
from .carrying import BESIDE, Carrying, carried_along

MOST_MADE = 32
"""Operations between what a loop gives and the sum."""
MOST = 4
"""Sums that one loop carries."""


@dataclass(frozen=True)
class SummedSteps:
    """Graph -> an equal graph whose loops carry the sums over their steps."""

    def __call__(self, graph: Graph) -> Graph:
        if not is_on("summed_steps") or not scans_of(graph):
            return graph
        graph, wanted = in_bodies(graph, self), defaultdict[int, list[Summed]](list)
        for scan in scans_of(graph):
            wanted[scan.id] += list(_sums_of(graph, scan))[:MOST]
        return carried_along(graph, wanted)


def _sums_of(graph: Graph, scan: Value) -> Iterator[Summed]:
    later = frozenset(below(graph, [scan]))
    for node in (v for v in graph.order() if v.prim == "sum" and v.dtype in FLOATS and v.args[0].id in later):
        found = (Summed(node, scan, later, axis) for axis in node.params["axes"])
        if (summed := next((s for s in found if s.is_possible), None)) is not None:
            yield summed


@dataclass(frozen=True)
class Summed:
    """A sum along the axis of a loop's steps. later: ids of what is made again in each of them."""

    node: Value
    scan: Value
    later: frozenset[int]
    axis: int

    @property
    def is_possible(self) -> bool:
        """What is summed is made of steps in a few operations, and no larger than a step of a result."""
        (source,), seen = self.node.args, list[Value]()
        is_made = self._is_made(source, self.axis, seen) and len(seen) <= MOST_MADE
        results = self.scan.avals[self.scan.params["carries"] :]
        given = (estimate(t.numel) // max(1, estimate(t.shape[0])) for t in results)
        return is_made and estimate(source.aval.numel) <= estimate(source.shape[self.axis]) * max(given, default=0)

    def _is_made(self, value: Value, axis: int, seen: list[Value]) -> bool:
        seen.append(value)
        if len(seen) > MOST_MADE:
            return False
        if value.id not in self.later:
            return PRIMS[value.prim].family in BESIDE and all(self._is_beside(a, seen) for a in value.args)
        if value.prim == "pick":
            is_step = value.args[0] == self.scan and value.params["index"] >= self.scan.params["carries"]
            return is_step and axis == 0
        along = axis_before(value, axis)
        return along is not None and all(self._is_made(a, along, seen) for a in value.args)

    def _is_beside(self, value: Value, seen: list[Value]) -> bool:
        seen.append(value)
        few = len(seen) <= MOST_MADE and PRIMS[value.prim].family in BESIDE
        return few and all(self._is_beside(a, seen) for a in value.args)

    @property
    def outside(self) -> list[Value]:
        return list(dict.fromkeys(self._read(self.node.args[0])))

    def _read(self, value: Value) -> Iterator[Value]:
        if value.id not in self.later:
            yield value
        elif value.prim != "pick":
            for arg in value.args:
                yield from self._read(arg)

    # ------------------------------------------------------------------ carried
    def carry(self, carrying: Carrying, env: Mapping[int, Any]) -> Callable[[], Value]:
        """What a step adds, over its other axes apart."""
        (source,) = self.node.args
        dtype = "f32" if source.dtype in LOW_FLOATS else source.dtype
        outside = {v.id: self._operand(carrying, env[v.id], axis) for v, axis in self._axes(source, self.axis)}
        start = zeros(TensorType(drop_axes(source.shape, (self.axis,)), dtype))
        number = carrying.carry(start, partial(self._added, carrying, outside))
        return lambda: self._total(carrying.ends[number])

    def _added(self, carrying: Carrying, outside: Mapping[int, Value], before: Value) -> Value:
        step = self._step(self.node.args[0], self.axis, carrying, outside)
        return emit("add", before, emit("cast", step, dtype=before.dtype) if step.dtype != before.dtype else step)

    def _total(self, end: Value) -> Value:
        rest = tuple(a - (a > self.axis) for a in self.node.params["axes"] if a != self.axis)
        total = emit("sum", end, axes=rest) if rest else end
        return emit("cast", total, dtype=self.node.dtype) if total.dtype != self.node.dtype else total

    def _axes(self, value: Value, axis: int) -> Iterator[tuple[Value, int]]:
        """What is read beside the steps, with the axis that goes with them."""
        if value.id not in self.later:
            yield value, axis
        elif value.prim != "pick":
            along = axis_before(value, axis)
            assert along is not None
            for arg in value.args:
                yield from self._axes(arg, along)

    def _operand(self, carrying: Carrying, value: Value, axis: int) -> Value:
        """One step of what is read beside the loop, within its body."""
        if value.prim == "broadcast" and axis not in value.params["axes"]:
            axes = tuple(a - (a > axis) for a in value.params["axes"])
            return carrying.whole(emit("broadcast", value.args[0], shape=drop_axes(value.shape, (axis,)), axes=axes))
        first = (axis, *(a for a in range(value.ndim) if a != axis))
        return carrying.step_of(emit("permute", value, perm=first) if axis else value)

    def _step(self, value: Value, axis: int, carrying: Carrying, outside: Mapping[int, Value]) -> Value:
        """A value in one step."""
        if value.id in outside:
            return outside[value.id]
        if value.prim == "pick":
            return carrying.result(value.params["index"])
        along = axis_before(value, axis)
        assert along is not None
        args = [self._step(a, along, carrying, outside) for a in value.args]
        return emit(value.prim, *args, **_params_of_step(value, axis, along))


def axis_before(value: Value, axis: int) -> int | None:
    """The axis of the operands that an axis of a value is; None where it is none of theirs alone."""
    if value.prim == "permute":
        return value.params["perm"][axis]  # type: ignore[no-any-return]
    if value.prim == "broadcast" and axis in value.params["axes"]:
        own = value.params["axes"].index(axis)
        return own if value.args[0].shape[own] != 1 else None
    return axis if PRIMS[value.prim].family == "elementwise" else None


def _params_of_step(value: Value, axis: int, along: int) -> dict[str, Any]:
    """The params of a node without its axis of the steps."""
    params = value.params
    if value.prim == "permute":
        return {"perm": tuple(a - (a > along) for a in params["perm"] if a != along)}
    if value.prim == "broadcast":
        axes = tuple(a - (a > axis) for a in params["axes"] if a != axis)
        return {"shape": drop_axes(value.shape, (axis,)), "axes": axes}
    return params
