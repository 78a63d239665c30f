"""The cheapest values of a loop's body from which others are made again elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import networkx as nx

from ...graph import Graph, Value
from ...prims import PRIMS
from ...rewrite import nodes_between

AGAIN = ("elementwise", "layout", "source")
"""Families that are computed again."""


def cheapest(
    body: Graph, ends: Sequence[Value], cost: Callable[[Value], int], at_hand: Collection[Value]
) -> list[Value]:
    """A minimum cut, in the order of the body. at_hand: inputs of the body that are known where it is made again."""
    network = nx.DiGraph()
    network.add_nodes_from(("known", "read"))
    network.add_edges_from((("out", v.id), "read") for v in ends)
    nodes = [*body.inputs, *nodes_between(ends, [v.id for v in body.inputs])]
    for value in nodes:
        # What has several results, such as a loop in the body, is cut at each of them: behind it, with no capacity here
        capacity = {"capacity": cost(value)} if len(value.avals) == 1 else {}
        network.add_edge(("in", value.id), ("out", value.id), **capacity)
        if value.prim != "input" and PRIMS[value.prim].family in AGAIN:
            network.add_edges_from((("out", a.id), ("in", value.id)) for a in value.args)
        elif value not in at_hand:
            network.add_edge("known", ("in", value.id))
    _, (_, near) = nx.minimum_cut(network, "known", "read")
    return [v for v in nodes if ("out", v.id) in near and ("in", v.id) not in near]
