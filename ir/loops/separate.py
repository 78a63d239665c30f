"""One loop as two: what is known without some of its operands first, and then the rest, which reads it step by step.

    h, t = f(h), f'(h) * t   ->   h, saved = f(h), f'(h)      and then      t = saved * t

What the second loop reads is handed over as results of the first one's steps, or computed again in each step: a minimum
cut of the body, by bytes. Where `t` runs the other way (the transpose), this is all that is kept of the first loop.
Where it is more than the loop reads and returns otherwise, blocks of about sqrt(T) steps are kept by what is carried
into them, and run again when the second loop comes to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import networkx as nx

from ..graph import Graph, Value
from ..passes.cost import estimate
from ..prims import PRIMS
from ..rewrite import nodes_between
from .blocks import in_blocks
from .loop import Loop, below, loop_of, rebuild_scans, scans_of
from .prune import prune_scans

AGAIN = ("elementwise", "layout", "source", "gather", "random", "pick", "reduce")
"""Families that a step may compute again. Products and calls are not done twice."""
Separate: TypeAlias = Callable[[Loop, Collection[int]], list[Value]]
MOST_KEPT = 2
"""The bytes that may be handed over for each that the loop reads or returns."""


def separate_scans(graph: Graph, moving: Collection[int], by: Separate | None = None) -> Graph:
    """The graph with each scan as two whose results depend in part on these inputs."""
    emit = by or separate
    moved = below(graph, [graph.inputs[i] for i in moving]) if scans_of(graph) else set()

    def rebuilt(node: Value, args: list[Value]) -> list[Value] | None:
        loop = loop_of(node, args)
        hits = [i for i, a in enumerate(node.args) if a.id in moved]
        return emit(loop, hits) if len(set(loop.moved(hits))) > 1 else None

    return prune_scans(rebuild_scans(graph, rebuilt))


def separate(loop: Loop, moving: Collection[int]) -> list[Value]:
    """The results of the loop, those that do not depend on the inputs `moving` of its body by a loop of their own."""
    if not _Separation(loop, moving).keeps_too_much():
        return _by_steps(loop, moving)
    steps = max(2, math.isqrt(estimate(loop.length)))
    return in_blocks(loop, steps, partial(_by_blocks, moving=moving), partial(_by_steps, moving=moving))


def _by_steps(loop: Loop, moving: Collection[int]) -> list[Value]:
    return _Separation(loop, moving).emit(AGAIN)


def _by_blocks(loop: Loop, moving: Collection[int]) -> list[Value]:
    """Of a loop over blocks: a block is run again, and its steps keep what they hand over while it is."""
    return _Separation(loop, moving, _by_steps).emit((*AGAIN, "scan"))


class _Separation:
    """A loop, and what of it depends on some inputs of its body. again: families that a step may compute again.

    by: how loops within its steps are separated.
    """

    def __init__(self, loop: Loop, moving: Collection[int], by: Separate | None = None) -> None:
        self.linear, self.is_moved = loop.dependents(moving), loop.moved(moving)
        self.loop = loop = replace(loop, body=separate_scans(loop.body, self.linear, by))
        self.moved = below(loop.body, [loop.body.inputs[i] for i in self.linear])
        self.count = len(loop.init)
        ys = list(zip(loop.results[self.count :], self.is_moved[self.count :], strict=True))
        self.known_ys, self.moved_ys = ([o for o, m in ys if m == is_moved] for is_moved in (False, True))

    def keeps_too_much(self) -> bool:
        """What all steps would hand over is more than the loop reads and returns."""
        loop, steps = self.loop, estimate(self.loop.length)
        given = loop.results[self.count :]
        kept = sum(estimate(v.aval.nbytes) for v in self.handed_over(AGAIN) if v not in given)
        read = sum(estimate(x.aval.nbytes) for x in (*loop.init, *loop.xs, *loop.wholes))
        return steps * kept > MOST_KEPT * (read + steps * sum(estimate(o.aval.nbytes) for o in given))

    def emit(self, again: Sequence[str]) -> list[Value]:
        """The results of the two loops, in the order of the one."""
        loop, count, inputs = self.loop, self.count, self.loop.inputs
        steps, same = list(zip(inputs.xs, loop.xs, strict=True)), list(zip(inputs.wholes, loop.wholes, strict=True))
        # The loop of what is known: its own results, and what the other one reads.
        carries = [[i for i in range(count) if (i in self.linear) == is_moved] for is_moved in (False, True)]
        handed = self.handed_over(again)
        ys = list(dict.fromkeys([*self.known_ys, *handed]))
        known = _results(loop.part(carries[0], self._known(steps), self._known(same), ys))
        at_step = dict(zip(ys, known[len(carries[0]) :], strict=True))
        # The loop of the rest, which has what was handed over among its xs.
        rest = _results(loop.part(carries[1], [*steps, *((v, at_step[v]) for v in handed)], same, self.moved_ys))
        supply = iter(known[: len(carries[0])]), iter(rest)
        ends = [next(supply[m]) for m in self.is_moved[:count]]
        given = zip(loop.results[count:], self.is_moved[count:], strict=True)
        return [*ends, *(next(supply[1]) if m else at_step[o] for o, m in given)]

    def _known(self, pairs: list[tuple[Value, Value]]) -> list[tuple[Value, Value]]:
        return [(v, o) for v, o in pairs if v.id not in self.moved]

    # ------------------------------------------------------------------ the cut
    def frontier(self) -> list[Value]:
        """The known values that the other loop reads, or carries on."""
        body, moved = self.loop.body, self.moved
        read = [a for v in body.order() if v.id in moved for a in v.args if a.id not in moved]
        ends = self.loop.results[: self.count]
        return list(dict.fromkeys([*read, *(o for i, o in enumerate(ends) if i in self.linear and o.id not in moved)]))

    def handed_over(self, again: Sequence[str]) -> list[Value]:
        """The known values that are handed over: the cheapest from which the frontier is computed again."""
        network, inputs, frontier = nx.DiGraph(), self.loop.body.inputs, self.frontier()
        network.add_nodes_from(("known", "read"))
        network.add_edges_from((("out", v.id), "read") for v in frontier)
        nodes = [*inputs, *nodes_between(frontier, [v.id for v in inputs])]
        for value in nodes:
            network.add_edge(("in", value.id), ("out", value.id), **self._capacity(value))
            network.add_edges_from(self._ways_to(value, again))
        _, (_, near) = nx.minimum_cut(network, "known", "read")
        return [v for v in nodes if ("out", v.id) in near and ("in", v.id) not in near]

    def _capacity(self, value: Value) -> dict[str, int]:
        """Bytes: written once and read once, or only read where it is a result anyway. {} is without bound."""
        if len(value.avals) > 1:
            return {}
        return {"capacity": estimate(value.aval.nbytes) * (1 if value in self.known_ys else 2)}

    def _ways_to(self, value: Value, again: Sequence[str]) -> Iterator[tuple[object, object]]:
        """A carry is known to the first loop alone, and so is what is not done twice; xs and wholes are at hand."""
        if value in self.loop.inputs.carries or (value.prim != "input" and PRIMS[value.prim].family not in again):
            yield "known", ("in", value.id)
        elif value.prim != "input":
            yield from ((("out", a.id), ("in", value.id)) for a in value.args)


def _results(loop: Loop) -> list[Value]:
    """Of a loop that may have none."""
    return loop.without_unread().emit() if loop.results else []
