"""A layered layout of an acyclic graph (Sugiyama, Tagawa & Toda 1981): dummies on long edges, barycentre ordering,
then least-squares positions. Invariant: boxes of one layer never overlap, and no edge runs through a box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import networkx as nx

Node: TypeAlias = str
Layers: TypeAlias = list[list[Node]]
Route: TypeAlias = list[Node]
Neighbours: TypeAlias = tuple[Node | None, Node | None]

DUMMY_WIDTH = 6.0
GAP = 22.0
SWEEPS = 16
SETTLING = 80
NEAR = 12.0  # how near an edge may pass a box or another edge
STRAIGHT = 40.0  # how much more a dummy wants to stand under a dummy than a box under a box


@dataclass(frozen=True)
class Layout:
    """Positions: nodes and dummies by layer, the centre of each, and the stations of each edge."""

    layers: Layers
    x: dict[Node, float]
    routes: dict[tuple[Node, Node], Route]


def ranks(graph: nx.DiGraph) -> dict[Node, int]:
    """Longest path from the top; a node without operands then sinks to just above its first user."""
    rank = {node: depth for depth, nodes in enumerate(nx.topological_generations(graph)) for node in nodes}
    for node in graph:
        if not graph.in_degree(node) and graph.out_degree(node):
            rank[node] = min(rank[user] for user in graph.successors(node)) - 1
    return rank


def arrange(
    graph: nx.DiGraph, rank: Mapping[Node, int], width: Mapping[Node, float], cluster: Mapping[Node, int]
) -> Layout:
    """Lay `graph` out on the given layers. Nodes of one cluster stand side by side in each layer."""
    proper, routes = with_dummies(graph, rank)
    widths = {node: width.get(node, DUMMY_WIDTH) for node in proper}
    inside = dict(cluster) | dummies_inside(routes, cluster)
    layers = order_layers(proper, inside)
    x = positions(proper, layers, widths)
    for _ in range(2):
        straighten(routes.values(), layers, widths, x)
    return Layout(layers, x, routes)


def with_dummies(graph: nx.DiGraph, rank: Mapping[Node, int]) -> tuple[nx.DiGraph, dict[tuple[Node, Node], Route]]:
    """a -> b over three layers  becomes  a -> a>b@1 -> a>b@2 -> b; the new graph, and the route of every edge."""
    proper = nx.DiGraph()
    proper.add_nodes_from((node, {"rank": rank[node]}) for node in graph)
    routes: dict[tuple[Node, Node], Route] = {}
    for a, b in graph.edges():
        between = {f"{a}>{b}@{r}": r for r in range(rank[a] + 1, rank[b])}
        proper.add_nodes_from((dummy, {"rank": r}) for dummy, r in between.items())
        routes[a, b] = [a, *between, b]
        proper.add_edges_from(pairwise(routes[a, b]))
    return proper, routes


def dummies_inside(routes: Mapping[tuple[Node, Node], Route], cluster: Mapping[Node, int]) -> dict[Node, int]:
    """The dummies of an edge within a cluster belong to it."""
    inner = [(a, b) for a, b in routes if a in cluster and cluster[a] == cluster.get(b)]
    return {dummy: cluster[a] for a, b in inner for dummy in routes[a, b][1:-1]}


# ---------------------------------------------------------------------- order within a layer
def order_layers(proper: nx.DiGraph, cluster: Mapping[Node, int]) -> Layers:
    """The order with the fewest crossings among some barycentre sweeps, downwards and upwards in turn."""
    # A sweep may make it worse on the way to something better: the best so far is kept.
    best = layers = initial(proper)
    fewest = crossings(proper, layers)
    for sweep in range(SWEEPS):
        layers = sweep_layers(proper, layers, cluster, down=sweep % 2 == 0)
        if (count := crossings(proper, layers)) < fewest or sweep == 0:
            best, fewest = layers, count
    return best


def initial(proper: nx.DiGraph) -> Layers:
    """Depth first from the bottom, so that the operands of one node start side by side."""
    height = 1 + max((rank for _, rank in proper.nodes(data="rank")), default=0)
    layers: Layers = [[] for _ in range(height)]
    sinks = [node for node in proper if not proper.out_degree(node)]
    ordered: dict[Node, None] = {}
    for sink in sinks:
        ordered.update(dict.fromkeys(nx.dfs_preorder_nodes(proper.reverse(copy=False), sink)))
    for node in ordered:
        layers[proper.nodes[node]["rank"]].append(node)
    return layers


def sweep_layers(proper: nx.DiGraph, layers: Layers, cluster: Mapping[Node, int], down: bool) -> Layers:
    """Reorder layer by layer, each by the mean place of its neighbours in the layer before it."""
    neighbours: Callable[[Node], Iterable[Node]] = proper.predecessors if down else proper.successors
    place: dict[Node, float] = {}
    finished: Layers = []
    for layer in layers if down else reversed(layers):
        wish = {node: mean([place[n] for n in neighbours(node)], default=i) for i, node in enumerate(layer)}
        finished.append(by_wish(layer, wish, cluster))
        place |= {node: float(i) for i, node in enumerate(finished[-1])}
    return finished if down else finished[::-1]


def by_wish(layer: list[Node], wish: Mapping[Node, float], cluster: Mapping[Node, int]) -> list[Node]:
    """Sorted by wish, with the members of a cluster kept together at their mean."""
    home = {node: cluster.get(node, node) for node in layer}
    centre = {h: mean([wish[n] for n in layer if home[n] == h], default=0) for h in home.values()}
    return sorted(layer, key=lambda node: (centre[home[node]], str(home[node]), wish[node]))


def mean(numbers: Sequence[float], default: float) -> float:
    return sum(numbers) / len(numbers) if numbers else float(default)


def crossings(proper: nx.DiGraph, layers: Layers) -> int:
    """Count the pairs of edges between neighbouring layers that cross."""
    place = {node: i for layer in layers for i, node in enumerate(layer)}
    total = 0
    for layer in layers:
        ends = [(place[a], place[b]) for a in layer for b in proper.successors(a)]
        total += sum((a - c) * (b - d) < 0 for i, (a, b) in enumerate(ends) for c, d in ends[:i])
    return total


# ---------------------------------------------------------------------- positions
def positions(proper: nx.DiGraph, layers: Layers, width: Mapping[Node, float]) -> dict[Node, float]:
    """Every node as near to the weighted mean of its neighbours as the boxes beside it allow."""
    # Side by side first; then layer after layer towards its neighbours, from above and from below in turn.
    x: dict[Node, float] = {}
    for layer in layers:
        x |= settle(layer, [0.0] * len(layer), [1.0] * len(layer), width)
    for sweep in range(SETTLING):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            pulls = [pull(proper, node, x, width) for node in layer]
            x |= settle(layer, [wish for wish, _ in pulls], [weight for _, weight in pulls], width)
    return x


def pull(proper: nx.DiGraph, node: Node, x: Mapping[Node, float], width: Mapping[Node, float]) -> tuple[float, float]:
    """The position that a node's neighbours pull it to, and how strongly."""
    adjacent = [*proper.predecessors(node), *proper.successors(node)]
    if not adjacent:
        return x[node], 1.0
    thin = width[node] == DUMMY_WIDTH
    weights = [STRAIGHT if thin and width[n] == DUMMY_WIDTH else 1.0 for n in adjacent]
    return sum(w * x[n] for w, n in zip(weights, adjacent, strict=True)) / sum(weights), sum(weights)


def straighten(routes: Iterable[Route], layers: Layers, width: Mapping[Node, float], x: dict[Node, float]) -> None:
    """Long edges run straight down as far as what stands beside them allows, instead of a little aside each layer."""
    neighbours = {node: pair for layer in layers for node, pair in neighbours_of(layer)}
    for route in routes:
        for run, place in straight_runs(route[1:-1], lambda node: room(node, neighbours, width, x), x):
            x.update(dict.fromkeys(run, place))


def neighbours_of(layer: Sequence[Node]) -> Iterable[tuple[Node, Neighbours]]:
    """Each node with the one to its left and the one to its right."""
    return zip(layer, zip([None, *layer], [*layer[1:], None], strict=False), strict=False)


def room(
    node: Node, neighbours: Mapping[Node, Neighbours], width: Mapping[Node, float], x: Mapping[Node, float]
) -> tuple[float, float]:
    """From where to where a node can move. Where it stands is always within."""
    left, right = neighbours[node]
    low = -math.inf if left is None else x[left] + (width[left] + width[node]) / 2 + NEAR
    high = math.inf if right is None else x[right] - (width[right] + width[node]) / 2 - NEAR
    return min(low, x[node]), max(high, x[node])


def straight_runs(
    chain: Route, room: Callable[[Node], tuple[float, float]], x: Mapping[Node, float]
) -> Iterable[tuple[Route, float]]:
    """The longest runs of a chain, from its top, that have a place in common; and that place."""
    run: Route = []
    low, high = -math.inf, math.inf
    for node in chain:
        below, above = room(node)
        if run and max(low, below) > min(high, above):
            yield run, min(max(sum(x[n] for n in run) / len(run), low), high)
            run, low, high = [], -math.inf, math.inf
        run, low, high = [*run, node], max(low, below), min(high, above)
    if run:
        yield run, min(max(sum(x[n] for n in run) / len(run), low), high)


def settle(
    layer: list[Node], wish: Sequence[float], weight: Sequence[float], width: Mapping[Node, float]
) -> dict[Node, float]:
    """min sum weight * (x - wish)**2 with room for every box: isotonic regression once the widths are taken out."""
    offset = [0.0]
    for a, b in pairwise(layer):
        offset.append(offset[-1] + (width[a] + width[b]) / 2 + GAP)
    fitted = isotonic([w - o for w, o in zip(wish, offset, strict=False)], weight)
    return {node: f + o for node, f, o in zip(layer, fitted, offset, strict=False)}


def isotonic(wish: Sequence[float], weight: Sequence[float]) -> list[float]:
    """The nearest non-decreasing sequence, by pooling adjacent violators."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, w in zip(wish, weight, strict=True):
        block = (value, w, 1)
        while blocks and blocks[-1][0] > block[0]:
            block = pool(blocks.pop(), block)
        blocks.append(block)
    return [value for value, _, members in blocks for _ in range(members)]


def pool(a: tuple[float, float, int], b: tuple[float, float, int]) -> tuple[float, float, int]:
    weight = a[1] + b[1]
    return (a[0] * a[1] + b[0] * b[1]) / weight, weight, a[2] + b[2]
