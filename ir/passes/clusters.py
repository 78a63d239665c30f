"""Clusters: nodes that run in one step, joined as long as the steps keep an order and do not hold more in memory."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, pairwise
from typing import Any

import networkx as nx

from ..graph import Value
from ..infer import same_shape, sizes_equal
from ..prims import PRIMS
from ..switches import is_on
from ..text.text import symbols_of
from ..types import Size, product
from .cost import Hints, estimate
from .node_kinds import NodeKinds


class Clusters:
    """Core and extern nodes in clusters whose quotient graph has no cycle; a cluster is named by its first node."""

    def __init__(self, kinds: NodeKinds, hints: Hints) -> None:
        self.kinds = kinds
        self.leader: dict[int, int] = {}
        self.dag = nx.DiGraph()
        self.lifetimes = Lifetimes(kinds, hints)
        for value in kinds.nodes.values():
            if not kinds.is_free(value) and value.prim != "pick":
                self._add(value)

    def of(self, value: Value) -> int | None:
        at = value.id
        if at not in self.leader:
            return None
        while self.leader[at] != at:
            at = self.leader[at]
        return at

    def ordered(self) -> list[int]:
        """Clusters in an order that runs, named by their first nodes."""
        return [c for c in nx.lexicographical_topological_sort(self.dag) if c >= 0]

    def _add(self, value: Value) -> None:
        """A node; behind a scatter a barrier, as its result is whole only when the kernel has ended."""
        self.leader[value.id] = value.id
        self.dag.add_node(value.id)
        for source in self.kinds.sources(value):
            if (origin := _origin(source)).prim != "input":
                self.dag.add_edge(self._exit(origin), value.id)
        if self._exit(value) != value.id:
            self.dag.add_edge(value.id, self._exit(value))

    def _exit(self, value: Value) -> int:
        return -1 - value.id if value.prim == "scatter" and not self.kinds.is_extern(value) else value.id

    def join(self, first: Value, second: Value) -> None:
        """Make one cluster of two, where that is legal and holds no more in memory than it saves in moving."""
        a, b = self.of(first), self.of(second)
        if a is None or b is None or a == b or not self._is_legal(a, b) or self.lifetimes.would_grow(a, b):
            return
        leader, joined = min(a, b), max(a, b)
        self.leader[joined] = leader
        self.lifetimes.join(leader, joined)
        self.dag.add_edges_from((p, leader) for p in list(self.dag.predecessors(joined)) if p != leader)
        self.dag.add_edges_from((leader, s) for s in list(self.dag.successors(joined)) if s != leader)
        self.dag.remove_node(joined)

    def _is_legal(self, a: int, b: int) -> bool:
        """No third cluster between the two, either way."""
        return not (self._has_detour(a, b) or self._has_detour(b, a))

    def _has_detour(self, a: int, b: int) -> bool:
        """A path of two edges or more leads from a to b."""
        todo = list(self.dag.successors(a))
        visited = set(todo)
        while todo:
            for follower in self.dag.successors(todo.pop()):
                if follower == b:
                    return True
                if follower not in visited:
                    visited.add(follower)
                    todo.append(follower)
        return False


class Lifetimes:
    """Values in memory while calls run: a group waits for the last call that it reads from, and so does what it reads.

        for each chunk: y = x[chunk] @ w;  total += f(y).sum()     one group for all chunks would hold every y at once
    """

    def __init__(self, kinds: NodeKinds, hints: Hints) -> None:
        self.kinds, self.hints = kinds, hints
        self.place = {i: place for place, i in enumerate(kinds.nodes)}
        self.members: dict[int, list[Value]] = {i: [v] for i, v in kinds.nodes.items()}
        self.waits: dict[int, int] = {}
        self.last: dict[int, int] = {v.id: len(self.place) for v in kinds.graph.results}
        for value in kinds.nodes.values():
            self._add(value)

    def _add(self, value: Value) -> None:
        """Sources come first: how long they wait is known."""
        sources = [] if self.kinds.is_free(value) else self.kinds.sources(value)
        for source in sources:
            self.last[source.id] = max(self.last.get(source.id, 0), self.place[value.id])
        calls = [self.place[s.id] for s in sources if self.kinds.in_memory(s) and s.prim != "input"]
        self.waits[value.id] = max([*calls, *(self.waits.get(s.id, -1) for s in sources)], default=-1)

    def join(self, leader: int, joined: int) -> None:
        self.members[leader] += self.members.pop(joined)
        self.waits[leader] = max(self.waits[leader], self.waits[joined])

    def would_grow(self, a: int, b: int) -> bool:
        """One group of two would hold more bytes for longer than it saves in moving them."""
        early, late = sorted((a, b), key=self.waits.__getitem__)
        if self.waits[early] == self.waits[late] or not is_on("lifetimes"):
            return False
        early_reads, late_reads = self._reads(early), self._reads(late)
        members = {v.id for v in self.members[early]}
        waiting = [v for v in early_reads.values() if v.prim != "input" and self.last[v.id] < self.waits[late]]
        shared = [v for i, v in early_reads.items() if i in late_reads]
        between = [v for i, v in late_reads.items() if i in members]
        return self._bytes(waiting) > self._bytes(shared) + 2 * self._bytes(between)

    def _reads(self, cluster: int) -> dict[int, Value]:
        """The values that a cluster reads of others."""
        own = {v.id for v in self.members[cluster]}
        return {s.id: s for v in self.members[cluster] for s in self.kinds.sources(v) if s.id not in own}

    def _bytes(self, values: Iterable[Value]) -> int:
        return sum(estimate(v.aval.nbytes, self.hints) for v in values)


def fused_clusters(kinds: NodeKinds, hints: Hints) -> Clusters:
    """The clusters of a graph, as large as legality and memory allow."""
    clusters = Clusters(kinds, hints)
    # every constraint on the order comes before the first join, which trusts the quotient graph
    clusters.dag.add_edges_from(pairwise(v.id for v in kinds.nodes.values() if PRIMS[v.prim].effect))
    _order_brought_sizes(clusters)
    # producers before siblings: a chain of nodes moves fewer bytes as one kernel than readers of one value do
    if is_on("fuse"):
        _join_producers(clusters)
    if is_on("fuse") and is_on("siblings"):
        _join_siblings(clusters, hints)
    return clusters


def _order_brought_sizes(clusters: Clusters) -> None:
    """A value made of a number that a call brings (`target.brings`: its symbols) comes after the call."""
    kinds = clusters.kinds
    brought = kinds.brought
    for value in kinds.nodes.values() if brought else ():
        calls = {brought[s] for s in _symbols(kinds, value) & brought.keys()} if value.id in clusters.leader else set()
        for call in calls - {value.id}:
            if not nx.has_path(clusters.dag, value.id, call):
                clusters.dag.add_edge(call, value.id)


def _symbols(kinds: NodeKinds, value: Value) -> set[Any]:
    """The symbols that a node is made of, and what is computed within it."""
    own = {s for part in (value.avals, *value.params.values()) for s in symbols_of(part)}
    return own.union(*(_symbols(kinds, a) for a in value.args if kinds.is_free(a)))


def _join_producers(clusters: Clusters) -> None:
    """Users in order, and for each its nearest producer first: then every legal pair is seen as legal."""
    for value in clusters.kinds.cores:
        for source in clusters.kinds.sources(value):
            if clusters.kinds.is_core(source):
                clusters.join(source, value)


def _join_siblings(clusters: Clusters, hints: Hints) -> None:
    """Clusters that read the same value and iterate over the same space."""
    readers: dict[Value, list[Value]] = {}
    for value in clusters.kinds.cores:
        for source in clusters.kinds.sources(value):
            readers.setdefault(source, []).append(value)
    for source, siblings in readers.items():
        for first, second in combinations(siblings, 2):
            if _share_space(clusters, first, second, source, hints):
                clusters.join(first, second)


def _share_space(clusters: Clusters, first: Value, second: Value, source: Value, hints: Hints) -> bool:
    """Two readers iterate alike: over the same shape, or both over as many elements as `source` has."""
    a, b = clusters.of(first), clusters.of(second)
    if a is None or b is None or a == b:
        return False
    spaces = _space(clusters, a, hints), _space(clusters, b, hints)
    return same_shape(*spaces) or all(sizes_equal(product(s), source.aval.numel) for s in spaces)


def _space(clusters: Clusters, cluster: int, hints: Hints) -> tuple[Size, ...]:
    """The largest shape that a cluster computes with, axes of size 1 apart."""
    members = [v for v in clusters.kinds.nodes.values() if clusters.of(v) == cluster]
    shapes = [x.shape for v in members for x in (v, *v.args) if len(x.avals) == 1]
    largest = max(shapes, key=lambda s: estimate(product(s), hints))
    return tuple(d for d in largest if d != 1)


def _origin(value: Value) -> Value:
    """The node whose result a pick reads."""
    return value.args[0] if value.prim == "pick" else value
