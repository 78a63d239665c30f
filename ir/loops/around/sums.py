"""Sums over the steps of a loop, of what it gives and what is made of that element by element, are carried along.

    (ys * w).sum(0)    ->    total = total + y * w in each step

Otherwise all steps would have to be in memory first, and another kernel would read them. So are sums of what a loop
reads step by step anyway (`beside`). Low floats are added in float32, and sums over more than the steps are taken
behind the loop. They are in another order than a sum of all steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...graph import Graph, Value, emit
from ...switches import is_on
from ...transforms.ops import zeros
from ...types import FLOATS, LOW_FLOATS, TensorType
from ..loop import below, scans_of
from ..tidy import in_bodies
from .carrying import Carrying, carried_along
from .made import Made

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
        found = (Made(node.args[0], axis, scan, later) for axis in node.params["axes"])
        if (made := next((m for m in found if m.is_possible), None)) is not None:
            yield Summed(node, made)


@dataclass(frozen=True)
class Summed:
    """A sum along the axis of a loop's steps, and what it is of."""

    node: Value
    made: Made

    @property
    def outside(self) -> list[Value]:
        return self.made.outside

    # ------------------------------------------------------------------ carried
    def carry(self, carrying: Carrying, env: Mapping[int, Any]) -> Callable[[], Value]:
        """What a step adds, over its other axes apart."""
        dtype = "f32" if self.node.dtype in LOW_FLOATS else self.node.dtype
        start = zeros(TensorType(self.made.shape, dtype))
        number = carrying.carry(start, partial(self._added, carrying, self.made.operands(carrying, env)))
        return lambda: self._total(carrying.ends[number])

    def _added(self, carrying: Carrying, operands: Mapping[int, Value], before: Value) -> Value:
        step = self.made.in_step(carrying, operands)
        return emit("add", before, emit("cast", step, dtype=before.dtype) if step.dtype != before.dtype else step)

    def _total(self, end: Value) -> Value:
        rest = tuple(a - (a > self.made.axis) for a in self.node.params["axes"] if a != self.made.axis)
        total = emit("sum", end, axes=rest) if rest else end
        return emit("cast", total, dtype=self.node.dtype) if total.dtype != self.node.dtype else total
