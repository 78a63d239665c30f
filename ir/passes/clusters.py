"""Clusters: nodes that run in one step, joined as long as the steps keep an order and do not hold more in memory."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import networkx as nx

from ..graph import Value
from ..infer import same_shape, sizes_equal
from ..lazy_attribute import lazy_attribute
from ..prims import PRIMS
from ..switches import is_on
from ..text.text import symbols_of
from ..types import Size, product
from .cost import Hints, estimate
from .node_kinds import NodeKinds

MANY_DETOURS = 16
"""Pairs that may not be joined, in a row, from which on what leads where is found for all nodes at once."""


class Bound(NamedTuple):
    """Bytes, and the sizes at which values are compared with them."""

    most: int | None = None
    sizes: Hints = {}  # noqa: RUF012  (never mutated)

    def holds(self, values: Iterable[Value]) -> bool:
        return self.most is None or sum(estimate(v.aval.nbytes, self.sizes) for v in values) <= self.most


UNBOUNDED = Bound()


class Clusters:
    """Core and extern nodes in clusters whose quotient graph has no cycle; a cluster is named by its first node.

    `joins`: how many there were so far.
    """

    def __init__(self, kinds: NodeKinds, hints: Hints, bound: Bound) -> None:
        self.kinds, self.joins = kinds, 0
        self.leader: dict[int, int] = {}
        self.dag = nx.DiGraph()
        self.lifetimes = Lifetimes(kinds, hints, bound)
        self.largest: dict[int, Largest] = {}
        for value in kinds.nodes.values():
            if value.prim == "pick":
                self._add_result(value)
            elif not kinds.is_free(value):
                self._add(value)

    def of(self, value: Value) -> int | None:
        at = value.id
        if at not in self.leader:
            return None
        while self.leader[at] != at:
            self.leader[at] = at = self.leader[self.leader[at]]
        return at

    def ordered(self) -> list[int]:
        """Clusters in an order that runs, named by their first nodes."""
        return [c for c in nx.lexicographical_topological_sort(self.dag) if c >= 0]

    def _add(self, value: Value) -> None:
        """A node; behind a scatter a barrier, as its result is whole only when the kernel has ended."""
        self.leader[value.id] = value.id
        self.largest[value.id] = self._largest(value)
        self.dag.add_node(value.id)
        for source in self.kinds.sources(value):
            if (origin := _origin(source)).prim != "input":
                self.dag.add_edge(self._exit(origin), value.id)
        if self._exit(value) != value.id:
            self.dag.add_edge(value.id, self._exit(value))

    def _add_result(self, value: Value) -> None:
        """One of several results is where all of them are made."""
        if not self.kinds.in_memory(value):
            self.leader[value.id] = value.args[0].id
            self.lifetimes.join(value.args[0].id, value.id)

    def _exit(self, value: Value) -> int:
        return -1 - value.id if value.prim == "scatter" and not self.kinds.is_extern(value) else value.id

    def _largest(self, value: Value) -> Largest:
        shapes = [v.shape for v in (value, *value.args) if len(v.avals) == 1] or [()]
        estimates = [self.lifetimes.estimate(product(s)) for s in shapes]
        best = max(range(len(shapes)), key=estimates.__getitem__)
        return Largest(-estimates[best], self.lifetimes.place[value.id], shapes[best])

    @lazy_attribute
    def _order(self) -> TopologicalOrder:
        """From the first join on no edge is added."""
        return TopologicalOrder(self.dag)

    def join(self, first: Value, second: Value) -> None:
        """Make one cluster of two, where that is legal and holds no more in memory than it saves in moving."""
        a, b = self.of(first), self.of(second)
        if a is None or b is None or a == b:
            return
        between = self._order.between(a, b)
        if between is None or self.lifetimes.would_grow(a, b):
            return
        leader, joined = min(a, b), max(a, b)
        self._order.contract(leader, joined, between)
        self.leader[joined] = leader
        self.lifetimes.join(leader, joined)
        self.largest[leader] = min(self.largest[leader], self.largest[joined], key=lambda own: own[:2])
        self.dag.add_edges_from((p, leader) for p in list(self.dag.predecessors(joined)) if p != leader)
        self.dag.add_edges_from((leader, s) for s in list(self.dag.successors(joined)) if s != leader)
        self.dag.remove_node(joined)
        self.joins += 1


class TopologicalOrder:
    """An order of a graph whose nodes are contracted: what is on a way between two has a place between theirs."""

    def __init__(self, dag: nx.DiGraph) -> None:
        self.dag = dag
        self.line: list[int | None] = list(nx.topological_sort(dag))
        self.place = {node: at for at, node in enumerate(self.line) if node is not None}
        self._detours = 0  # found since the last contraction
        self._led_to: dict[int, int] = {}

    def between(self, a: int, b: int) -> set[int] | None:
        """The nodes up to the later one that the earlier one leads to; None where they lead to the later one."""
        first, last = sorted((a, b), key=self.place.__getitem__)
        if self._detours > MANY_DETOURS and self._has_detour(first, last):
            return None
        reached = self._reached(first, last)
        self._detours += reached is None
        return reached

    def _has_detour(self, first: int, last: int) -> bool:
        """Asked of what every node leads to, as bits by its place: found once, where many ask between contractions."""
        if not self._led_to:
            for node in reversed([n for n in self.line if n is not None]):
                followers = [(self._led_to[s], self.place[s]) for s in self.dag.successors(node)]
                self._led_to[node] = functools.reduce(lambda bits, f: bits | f[0] | 1 << f[1], followers, 0)
        return any(self._led_to[s] >> self.place[last] & 1 for s in self.dag.successors(first) if s != last)

    def _reached(self, first: int, last: int) -> set[int] | None:
        end = self.place[last]
        reached = {s for s in self.dag.successors(first) if self.place[s] < end}
        todo = list(reached)
        while todo:
            for follower in self.dag.successors(todo.pop()):
                if follower == last:
                    return None
                if self.place[follower] < end and follower not in reached:
                    reached.add(follower)
                    todo.append(follower)
        return reached

    def contract(self, leader: int, joined: int, between: set[int]) -> None:
        """One node in place of two: before what the earlier one leads to, behind all else in between."""
        self._detours, self._led_to = 0, {}
        start, end = sorted((self.place[leader], self.place.pop(joined)))
        inner = [node for node in self.line[start + 1 : end] if node is not None]
        moved = [*(n for n in inner if n not in between), leader, *(n for n in inner if n in between)]
        # gaps stay behind: the next node to be joined is near
        self.line[start : end + 1] = [*[None] * (end + 1 - start - len(moved)), *moved]
        self.place |= {node: at for at, node in enumerate(moved, start=end + 1 - len(moved))}


class Lifetimes:
    """Values in memory while calls run: a group waits for the last call that it reads from, and so does what it reads.

        for each chunk: y = x[chunk] @ w;  total += f(y).sum()     one group for all chunks would hold every y at once

    `reads`: the values that a cluster reads of others. bound: what is more than that waits only if it saves several
    times as much, since it adds to the peak of memory.

        for each chunk: dw += dz[chunk].mT @ x[chunk]     one group for two chunks holds three of these, by itself two
    """

    def __init__(self, kinds: NodeKinds, hints: Hints, bound: Bound) -> None:
        self.kinds, self.hints, self.bound = kinds, hints, bound
        self.place = {i: place for place, i in enumerate(kinds.nodes)}
        self.members: dict[int, set[int]] = {i: {i} for i in kinds.nodes}
        self.reads: dict[int, dict[int, Value]] = {}
        self.waits: dict[int, int] = {}
        self.last: dict[int, int] = {v.id: len(self.place) for v in kinds.graph.results}
        self._estimates: dict[Size, int] = {}
        for value in kinds.nodes.values():
            self._add(value)

    def _add(self, value: Value) -> None:
        """Sources come first: how long they wait is known."""
        sources = [] if self.kinds.is_free(value) else self.kinds.sources(value)
        self.reads[value.id] = {s.id: s for s in sources}
        for source in sources:
            self.last[source.id] = max(self.last.get(source.id, 0), self.place[value.id])
        calls = [self.place[s.id] for s in sources if self.kinds.in_memory(s) and s.prim != "input"]
        self.waits[value.id] = max([*calls, *(self.waits.get(s.id, -1) for s in sources)], default=-1)

    def join(self, leader: int, joined: int) -> None:
        """The smaller of the two moves into the larger."""
        small, large = sorted((leader, joined), key=lambda c: len(self.members[c]) + len(self.reads[c]))
        members, reads = self.members.pop(large), self.reads.pop(large)
        for own in self.members[small]:
            reads.pop(own, None)
        reads.update((i, v) for i, v in self.reads.pop(small).items() if i not in members)
        members |= self.members.pop(small)
        self.members[leader], self.reads[leader] = members, reads
        self.waits[leader] = max(self.waits[leader], self.waits[joined])

    def would_grow(self, a: int, b: int) -> bool:
        """One group of two would hold more bytes for longer than it saves in moving them."""
        early, late = sorted((a, b), key=self.waits.__getitem__)
        if self.waits[early] == self.waits[late] or not is_on("lifetimes"):
            return False
        early_reads, late_reads = self.reads[early], self.reads[late]
        waiting = [v for v in early_reads.values() if v.prim != "input" and self.last[v.id] < self.waits[late]]
        shared = [late_reads[i] for i in early_reads.keys() & late_reads.keys()]
        between = [late_reads[i] for i in late_reads.keys() & self.members[early]]
        waits, saved = self._bytes(waiting), self._bytes(shared) + self._bytes(between)
        return waits > saved + self._bytes(between) or (waits >= saved and not self.bound.holds(waiting))

    def _bytes(self, values: Iterable[Value]) -> int:
        return sum(self.estimate(v.aval.nbytes) for v in values)

    def estimate(self, size: Size) -> int:
        """A size at the hints."""
        if size not in self._estimates:
            self._estimates[size] = estimate(size, self.hints)
        return self._estimates[size]


def fused_clusters(kinds: NodeKinds, hints: Hints, bound: Bound = UNBOUNDED, at_all: bool = False) -> Clusters:
    """The clusters of a graph, as large as legality and memory allow; at_all: whether they share anything or not."""
    clusters = Clusters(kinds, hints, bound)
    # every constraint on the order comes before the first join, which trusts the quotient graph
    clusters.dag.add_edges_from(pairwise(v.id for v in kinds.nodes.values() if PRIMS[v.prim].effect))
    _order_brought_sizes(clusters)
    # producers before siblings: a chain of nodes moves fewer bytes as one kernel than readers of one value do
    if is_on("fuse"):
        _join_producers(clusters)
    if is_on("fuse") and is_on("siblings"):
        _join_siblings(clusters)
    for first, second in pairwise(kinds.cores) if at_all else ():
        clusters.join(first, second)
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


def _join_siblings(clusters: Clusters) -> None:
    """Clusters that read the same value and iterate over the same space."""
    readers: dict[Value, list[Value]] = {}
    for value in clusters.kinds.cores:
        for source in clusters.kinds.sources(value):
            readers.setdefault(source, []).append(value)
    for source, siblings in readers.items():
        tried: dict[int | None, int] = {}
        for at, first in enumerate(siblings):
            # what was tried with a cluster is not tried again while nothing is joined
            if tried.get(clusters.of(first)) != clusters.joins:
                joins = clusters.joins
                _join_with(clusters, first, siblings[at + 1 :], source)
                tried[clusters.of(first)] = joins


def _join_with(clusters: Clusters, first: Value, siblings: Iterable[Value], source: Value) -> None:
    for second in siblings:
        if _share_space(clusters, first, second, source):
            clusters.join(first, second)


def _share_space(clusters: Clusters, first: Value, second: Value, source: Value) -> bool:
    """Two readers iterate alike: over the same shape, or both over as many elements as `source` has."""
    a, b = clusters.of(first), clusters.of(second)
    if a is None or b is None or a == b:
        return False
    spaces = clusters.largest[a].space, clusters.largest[b].space
    return same_shape(*spaces) or all(sizes_equal(product(s), source.aval.numel) for s in spaces)


class Largest(NamedTuple):
    """The largest shape that nodes compute with, the first of several: the least of these (`estimate` is negative)."""

    estimate: int
    place: int
    shape: tuple[Size, ...]

    @property
    def space(self) -> tuple[Size, ...]:
        """Axes of size 1 apart."""
        return tuple(d for d in self.shape if d != 1)


def _origin(value: Value) -> Value:
    """The node whose result a pick reads."""
    return value.args[0] if value.prim == "pick" else value
