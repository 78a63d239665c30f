"""One loop as two: what is known without some of its operands first, and then the rest, which reads it step by step.

    h, t = f(h), f'(h) * t   ->   h, saved = f(h), f'(h)      and then      t = saved * t

What the second loop reads is handed over as results of the first one's steps, or computed again in each step: a minimum
cut of the body, by bytes. Where `t` runs the other way (the transpose), this is all that is kept of the first loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import networkx as nx

from ..graph import Graph, Value
from ..passes.cost import estimate
from ..prims import PRIMS
from ..rewrite import nodes_between
from .loop import Loop, below, loop_of, rebuild_scans

AGAIN = ("elementwise", "layout", "source", "gather", "random", "pick", "reduce")
"""Families that a step may compute again. Products and calls are not done twice."""


def separate(loop: Loop, moving: Collection[int]) -> list[Value]:
    """The results of the loop, those that do not depend on the inputs `moving` of its body by a loop of their own."""
    linear, is_moved = loop.dependents(moving), loop.moved(moving)
    loop = replace(loop, body=separate_scans(loop.body, linear))
    moved = below(loop.body, [loop.body.inputs[i] for i in linear])
    count = len(loop.init)
    pairs = [list(zip(v, o, strict=True)) for v, o in zip(loop.inputs[1:], (loop.xs, loop.wholes), strict=True)]
    # The loop of what is known: its own results, and what the other one reads.
    known_carries = [i for i in range(count) if i not in linear]
    known_ys = [o for o, m in zip(loop.results[count:], is_moved[count:], strict=True) if not m]
    handed = _handed_over(loop, _frontier(loop, linear, moved), known_ys)
    ys = list(dict.fromkeys([*known_ys, *handed]))
    xs, wholes = ([(v, o) for v, o in part if v.id not in moved] for part in pairs)
    known = _results(loop.part(known_carries, xs, wholes, ys))
    at_step = dict(zip(ys, known[len(known_carries) :], strict=True))
    # The loop of the rest, which has what was handed over among its xs.
    own_carries = [i for i in range(count) if i in linear]
    own_ys = [o for o, m in zip(loop.results[count:], is_moved[count:], strict=True) if m]
    rest = _results(loop.part(own_carries, [*pairs[0], *((v, at_step[v]) for v in handed)], pairs[1], own_ys))
    supply = iter(known[: len(known_carries)]), iter(rest)
    ends = [next(supply[m]) for m in is_moved[:count]]
    given = zip(loop.results[count:], is_moved[count:], strict=True)
    return [*ends, *(next(supply[1]) if m else at_step[o] for o, m in given)]


def _results(loop: Loop) -> list[Value]:
    """Of a loop that may have none."""
    return loop.without_unread().emit() if loop.results else []


def _frontier(loop: Loop, linear: Collection[int], moved: Collection[int]) -> list[Value]:
    """The known values that the other loop reads, or carries on."""
    read = [a for v in loop.body.order() if v.id in moved for a in v.args if a.id not in moved]
    carried = [o for i, o in enumerate(loop.results[: len(loop.init)]) if i in linear and o.id not in moved]
    return list(dict.fromkeys([*read, *carried]))


# ------------------------------------------------------------------------------------------------------- the cut
def _handed_over(loop: Loop, frontier: list[Value], stacked: list[Value]) -> list[Value]:
    """The known values that are handed over: the cheapest from which the frontier is computed again."""
    network = nx.DiGraph()
    network.add_nodes_from(("known", "read"))
    network.add_edges_from((("out", v.id), "read") for v in frontier)
    carries = loop.inputs.carries
    nodes = [*loop.body.inputs, *nodes_between(frontier, [v.id for v in loop.body.inputs])]
    for value in nodes:
        network.add_edge(("in", value.id), ("out", value.id), **_capacity(value, stacked))
        network.add_edges_from(_ways_to(value, carries))
    _, (_, near) = nx.minimum_cut(network, "known", "read")
    return [v for v in nodes if ("out", v.id) in near and ("in", v.id) not in near]


def _capacity(value: Value, stacked: list[Value]) -> dict[str, int]:
    """Bytes: written once and read once, or only read where it is a result anyway. {} is without bound."""
    if len(value.avals) > 1:
        return {}
    return {"capacity": estimate(value.aval.nbytes) * (1 if value in stacked else 2)}


def _ways_to(value: Value, carries: list[Value]) -> Iterator[tuple[object, object]]:
    """A carry is known to the first loop alone, and so is what is not done twice; xs and wholes are at hand."""
    if value in carries or (value.prim != "input" and PRIMS[value.prim].family not in AGAIN):
        yield "known", ("in", value.id)
    elif value.prim != "input":
        yield from ((("out", a.id), ("in", value.id)) for a in value.args)


# ------------------------------------------------------------------------------------------------------- a graph
def separate_scans(graph: Graph, moving: Collection[int]) -> Graph:
    """The graph with each scan as two whose results depend in part on these inputs."""
    moved = below(graph, [graph.inputs[i] for i in moving])

    def rebuilt(node: Value, args: list[Value]) -> list[Value] | None:
        loop = loop_of(node, args)
        hits = [i for i, a in enumerate(node.args) if a.id in moved]
        return separate(loop, hits) if len(set(loop.moved(hits))) > 1 else None

    return rebuild_scans(graph, rebuilt)
