"""Cut a graph into steps: groups that become kernels, calls of what is not ours, and views that cost nothing.

A group is as large as legality allows: everything connected that no extern node separates, and beside it what reads the
same value over the same space. The generator cuts further where one launch cannot do it. What crosses a boundary is
written to memory, unless reading its sources again moves no more bytes; then the consumer computes it once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any, TypeAlias

import networkx as nx

from ..graph import Graph, Value
from ..infer import same_shape, sizes_equal
from ..lazy_attribute import lazy_attribute
from ..prims import PRIMS
from ..rewrite import extract
from ..switches import is_on
from ..text.text import symbols_of
from ..types import COMPLEX, FLOAT8, Size, contiguous_strides, elements_in_memory, product
from .cost import Hints, estimate
from .layout import only_ones

EXTERN = ("extern", "contract")
VIEWS = ("permute", "broadcast", "slice", "reshape")
SOURCES = ("full", "iota")
CHEAP = ("elementwise", "layout", "source")
MOST_RECOMPUTED = 32


@dataclass(frozen=True)
class Group:
    """Fusible nodes that run together. `graph` stands alone; `inputs` and `outputs` are its ends in the whole graph."""

    graph: Graph
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class Extern:
    """One node that is called as it is. Results of a node with several are read through its picks."""

    value: Value


@dataclass(frozen=True)
class View:
    """One layout node on something in memory, or a constant: torch does it, and no kernel is generated."""

    value: Value


Step: TypeAlias = Group | Extern | View


@dataclass(frozen=True)
class Fuse:
    """Graph -> steps in an order that runs. `apart`: ids of fusible values that are to be called instead.

    `hints` are sizes to compare costs at.
    """

    apart: frozenset[int] = frozenset()
    hints: Hints = field(default_factory=dict, hash=False)

    def __call__(self, graph: Graph) -> list[Step]:
        return list(Cut(graph, self.apart, self.hints).steps())


# ------------------------------------------------------------------------------------------------------- kinds
def is_extern(value: Value, apart: frozenset[int] = frozenset()) -> bool:
    """Called as it is: no primitive of ours, a product, dtypes that torch alone rounds as torch does, or told so."""
    dtypes = {t.dtype for v in (value, *value.args) for t in v.avals}
    torchs = dtypes & set(COMPLEX) or (dtypes & set(FLOAT8) and not only_moves(value))
    return bool(torchs) or PRIMS[value.prim].family in EXTERN or value.id in apart


def only_moves(value: Value) -> bool:
    """The value is stored, moved, converted or chosen, not computed: all that eight-bit floats are for."""
    if value.prim == "full":
        return bool(value.params["value"] == 0)
    return value.prim in ("cast", "where") or PRIMS[value.prim].family in ("input", "layout", "gather")


def is_view(value: Value) -> bool:
    """A layout node that torch performs without touching memory."""
    if value.prim != "reshape":
        return value.prim in VIEWS
    (source,) = value.args
    return only_ones(source.shape, value.shape) or is_packed(source)


def is_packed(value: Value) -> bool:
    """Row-major in memory, once it is in memory."""
    if value.prim == "input":
        return same_shape(value.params["strides"], contiguous_strides(value.shape))
    return is_packed(value.args[0]) if value.prim == "reshape" else value.prim not in VIEWS


# ---------------------------------------------------------------------------------------------------------- cut
class Cut:
    """The work of one call: clusters of nodes, then what is materialised, then the steps."""

    def __init__(self, graph: Graph, apart: frozenset[int], hints: Hints) -> None:
        self.graph, self.hints = graph, hints
        self.nodes = {v.id: v for v in graph.order()}
        self.brought = {s: v.id for v in self.nodes.values() for s in getattr(v.params.get("target"), "brings", ())}
        self.apart = apart | frozenset(self._late()) if self.brought else apart
        self.clusters = Clusters(self)
        self.stored: dict[int, Value] = {}
        self._store_results()

    def _late(self) -> Iterator[int]:
        """Views of a size that a call brings, of what there may be before the call: no kernel makes both."""
        behind: dict[int, frozenset[int]] = {}
        for value in self.nodes.values():
            behind[value.id] = frozenset().union(*({a.id} | behind.get(a.id, frozenset()) for a in value.args))
            sizes = {s for s in symbols_of(value.avals) if s in self.brought}
            if is_view(value) and value.args and not {self.brought[s] for s in sizes} <= behind[value.id]:
                yield value.id

    # ------------------------------------------------------------------ kinds of this graph
    def extern(self, value: Value) -> bool:
        return is_extern(value, self.apart)

    def given(self, value: Value) -> bool:
        """In memory without a kernel of ours."""
        return value.prim in ("input", "pick") or self.extern(value)

    def free(self, value: Value) -> bool:
        """Costs nothing wherever it is needed, and so belongs to no cluster."""
        return not self.given(value) and (value.prim in SOURCES or is_view(value))

    def base(self, value: Value) -> Value:
        """What a chain of views looks at. A view that is called as it is is no link of a chain."""
        while is_view(value) and not self.given(value):
            (value,) = value.args
        return value

    def core(self, value: Value) -> bool:
        return not self.given(value) and not self.free(value)

    @lazy_attribute
    def externs(self) -> list[Value]:
        return [v for v in self.nodes.values() if self.extern(v)]

    def sources(self, value: Value) -> list[Value]:
        """The core and given values that a node reads, through whatever is free."""
        found: dict[Value, None] = {}
        todo = list(value.args)
        while todo:
            arg = todo.pop()
            if self.free(arg):
                todo.extend(arg.args)
            else:
                found[arg] = None
        return sorted(found, key=lambda v: v.id, reverse=True)

    # ------------------------------------------------------------------ what is in memory
    def _store_results(self) -> None:
        """Results that are computed here, and what externs look at; a view of something in memory stays a view."""
        results = self.graph.results
        read = [self.base(a) for v in self.externs for a in v.args]
        for value in (*(r for r in results if self.core(r)), *(b for b in read if self.core(b))):
            self.stored[value.id] = value
        for value in results:
            base = self.base(value)
            if self.free(value) and self.core(base) and (base.id not in self.stored or base in results):
                kept = base if self._only_repeats(value, base) else value
                self.stored[kept.id] = kept

    def _only_repeats(self, value: Value, base: Value) -> bool:
        """A result that leaves the graph as an expanded view of what it looks at: no element is written twice."""
        strides = self.graph.strides_of_output(value)
        if strides is None or all(s != 0 for s in strides):
            return False
        return sizes_equal(elements_in_memory(value.shape, strides), product(base.shape))

    def inputs(self, outputs: Iterable[Value], cluster: int) -> list[Value]:
        """What a cluster reads to compute `outputs`: a value of another cluster is stored, or computed again."""
        reads: dict[int, Value] = {}
        seen: set[int] = set()
        todo = list(outputs)
        while todo:
            value = todo.pop()
            if value.id in seen:
                continue
            seen.add(value.id)
            if self.given(value):
                reads[value.id] = value
            elif self.free(value) or self.clusters.of(value) == cluster or self._again(value):
                todo.extend(value.args)
            else:
                reads[value.id] = self.stored[value.id] = value
        return [reads[i] for i in sorted(reads)]

    def _again(self, value: Value) -> bool:
        """Whether computing a value of another cluster again moves no more bytes than having it in memory."""
        if not (is_on("fuse") and is_on("duplicate")):
            return False
        roots: dict[int, Value] = {}
        count, todo = 0, [value]
        while todo:
            at = todo.pop()
            if self.given(at) or (at.id in self.stored and at != value):
                roots[at.id] = at
                continue
            count += 1
            if PRIMS[at.prim].family not in CHEAP or count > MOST_RECOMPUTED:
                return False
            todo.extend(at.args)
        reading = sum(estimate(r.aval.nbytes, self.hints) for r in roots.values())
        return reading <= estimate(value.aval.nbytes, self.hints) * (1 if value.id in self.stored else 2)

    # ------------------------------------------------------------------ steps
    def steps(self) -> Iterator[Step]:
        done: set[int] = set()
        groups = self._groups()
        for cluster in self.clusters.ordered():
            value = self.nodes[cluster]
            if self.extern(value):
                yield from self._views(value.args, done)
                yield Extern(value)
            elif cluster in groups:
                yield groups[cluster]
        yield from self._views(self.graph.results, done)

    def _views(self, values: Sequence[Value], done: set[int]) -> Iterator[View]:
        """Views that lead to these values from what is in memory; each once."""
        for value in values:
            if self.free(value) and value.id not in self.stored and value.id not in done:
                yield from self._views(value.args, done)
                done.add(value.id)
                yield View(value)

    def _groups(self) -> dict[int, Group]:
        """Later clusters first, so that an earlier one knows all that is read of it."""
        ends: dict[int, tuple[list[Value], list[Value]]] = {}
        for cluster in reversed(self.clusters.ordered()):
            outputs = [v for _, v in sorted(self.stored.items()) if self.clusters.of(self.base(v)) == cluster]
            if outputs:
                ends[cluster] = (self.inputs(outputs, cluster), outputs)
        numbers = {c: i for i, c in enumerate(sorted(ends), start=1)}
        return {c: self._group(*ends[c], f"_{numbers[c]}" if len(ends) > 1 else "") for c in ends}

    def _group(self, inputs: list[Value], outputs: list[Value], suffix: str) -> Group:
        layouts = {v.id: s for v in inputs if (s := self._strides(v)) is not None}
        strides = [self._strides(v) or contiguous_strides(v.shape) for v in outputs]
        graph = extract(outputs, inputs, name=f"{self.graph.name}{suffix}", strides=strides, layouts=layouts)
        return Group(graph, tuple(inputs), tuple(outputs))

    def _strides(self, value: Value) -> tuple[Size, ...] | None:
        """The layout of what is stored where it leaves the graph."""
        return self.graph.strides_of_output(value) if value.id in self.stored else None


# ------------------------------------------------------------------------------------------------------ clusters
class Clusters:
    """Core and extern nodes in clusters whose quotient graph has no cycle; a cluster is named by its first node."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.leader: dict[int, int] = {}
        self.dag = nx.DiGraph()
        self.lifetimes = Lifetimes(cut)
        for value in cut.nodes.values():
            if not cut.free(value) and value.prim != "pick":
                self._add(value)
        self._keep_effects_in_order()
        self._keep_numbers_in_order()
        if is_on("fuse"):
            self._join_producers()
        if is_on("fuse") and is_on("siblings"):
            self._join_siblings()

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
        for source in self.cut.sources(value):
            if (origin := _origin(source)).prim != "input":
                self.dag.add_edge(self._exit(origin), value.id)
        if value.prim == "scatter" and not self.cut.extern(value):
            self.dag.add_edge(value.id, -1 - value.id)

    def _exit(self, value: Value) -> int:
        return -1 - value.id if value.prim == "scatter" and not self.cut.extern(value) else value.id

    def _keep_effects_in_order(self) -> None:
        effects = [v.id for v in self.cut.nodes.values() if PRIMS[v.prim].effect]
        self.dag.add_edges_from(pairwise(effects))

    def _keep_numbers_in_order(self) -> None:
        """What is made of a number that a call brings (`target.brings`: its symbols) comes after the call."""
        brought = self.cut.brought
        for value in self.cut.nodes.values() if brought else ():
            sources = {brought[s] for s in self._symbols(value) & brought.keys()} if value.id in self.leader else set()
            for source in sources - {value.id}:
                if not nx.has_path(self.dag, value.id, source):
                    self.dag.add_edge(source, value.id)

    def _symbols(self, value: Value) -> set[Any]:
        """The symbols that a node is made of, and what is computed within it."""
        own = {s for part in (value.avals, *value.params.values()) for s in symbols_of(part)}
        return own.union(*(self._symbols(a) for a in value.args if self.cut.free(a)))

    def _join_producers(self) -> None:
        """Users in order, and for each its nearest producer first: then every legal pair is seen as legal."""
        for value in self.cut.nodes.values():
            if self.cut.core(value):
                for source in self.cut.sources(value):
                    if self.cut.core(source):
                        self._join(source, value)

    def _join_siblings(self) -> None:
        """Clusters that read the same value and iterate over the same space."""
        for source, readers in self._readers().items():
            for first, second in combinations(readers, 2):
                if self._same_space(first, second, source):
                    self._join(first, second)

    def _readers(self) -> dict[Value, list[Value]]:
        readers: dict[Value, list[Value]] = {}
        for value in self.cut.nodes.values():
            if self.cut.core(value):
                for source in self.cut.sources(value):
                    readers.setdefault(source, []).append(value)
        return readers

    def _same_space(self, first: Value, second: Value, source: Value) -> bool:
        """Whether two readers iterate alike: over the same shape, or both over as many elements as `source` has."""
        a, b = self.of(first), self.of(second)
        if a is None or b is None or a == b:
            return False
        one, other = self._space(a), self._space(b)
        everything = source.aval.numel
        return same_shape(one, other) or all(sizes_equal(product(space), everything) for space in (one, other))

    def _space(self, cluster: int) -> tuple[Size, ...]:
        """The largest shape that a cluster computes with, axes of size 1 apart."""
        members = [v for v in self.cut.nodes.values() if self.of(v) == cluster]
        shapes = [x.shape for v in members for x in (v, *v.args) if len(x.avals) == 1]
        largest = max(shapes, key=lambda s: estimate(product(s), self.cut.hints))
        return tuple(d for d in largest if d != 1)

    def _join(self, first: Value, second: Value) -> None:
        a, b = self.of(first), self.of(second)
        if a is None or b is None or a == b or not self._legal(a, b) or self.lifetimes.grow(a, b):
            return
        keep, gone = min(a, b), max(a, b)
        self.leader[gone] = keep
        self.lifetimes.join(keep, gone)
        self.dag.add_edges_from((p, keep) for p in list(self.dag.predecessors(gone)) if p != keep)
        self.dag.add_edges_from((keep, s) for s in list(self.dag.successors(gone)) if s != keep)
        self.dag.remove_node(gone)

    def _legal(self, a: int, b: int) -> bool:
        """No third cluster between the two, either way."""
        return not (self._around(a, b) or self._around(b, a))

    def _around(self, a: int, b: int) -> bool:
        """Whether a path of two edges or more leads from a to b."""
        todo = list(self.dag.successors(a))
        seen = set(todo)
        while todo:
            for follower in self.dag.successors(todo.pop()):
                if follower == b:
                    return True
                if follower not in seen:
                    seen.add(follower)
                    todo.append(follower)
        return False


class Lifetimes:
    """What is in memory while calls run: a group waits for the last call that it reads from, and so does what it reads.

        for each chunk: y = x[chunk] @ w;  total += f(y).sum()     one group for all chunks would hold every y at once
    """

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.place = {i: place for place, i in enumerate(cut.nodes)}
        self.members: dict[int, list[Value]] = {i: [v] for i, v in cut.nodes.items()}
        self.waits: dict[int, int] = {}
        self.last: dict[int, int] = {v.id: len(self.place) for v in cut.graph.results}
        for value in cut.nodes.values():
            self._add(value)

    def _add(self, value: Value) -> None:
        """Sources come first: how long they wait is known."""
        sources = [] if self.cut.free(value) else self.cut.sources(value)
        for source in sources:
            self.last[source.id] = max(self.last.get(source.id, 0), self.place[value.id])
        called = [self.place[s.id] for s in sources if self.cut.given(s) and s.prim != "input"]
        self.waits[value.id] = max([*called, *(self.waits.get(s.id, -1) for s in sources)], default=-1)

    def join(self, keep: int, gone: int) -> None:
        self.members[keep] += self.members.pop(gone)
        self.waits[keep] = max(self.waits[keep], self.waits[gone])

    def grow(self, a: int, b: int) -> bool:
        """Whether one group of two would hold more bytes for longer than it saves in moving them."""
        early, late = sorted((a, b), key=self.waits.__getitem__)
        if self.waits[early] == self.waits[late] or not is_on("lifetimes"):
            return False
        reads, others = self._reads(early), self._reads(late)
        own = {v.id for v in self.members[early]}
        held = [v for v in reads.values() if v.prim != "input" and self.last[v.id] < self.waits[late]]
        shared = [v for i, v in reads.items() if i in others]
        between = [v for i, v in others.items() if i in own]
        return self._bytes(held) > self._bytes(shared) + 2 * self._bytes(between)

    def _reads(self, cluster: int) -> dict[int, Value]:
        """What a cluster reads of others."""
        own = {v.id for v in self.members[cluster]}
        return {s.id: s for v in self.members[cluster] for s in self.cut.sources(v) if s.id not in own}

    def _bytes(self, values: Iterable[Value]) -> int:
        return sum(estimate(v.aval.nbytes, self.cut.hints) for v in values)


def _origin(value: Value) -> Value:
    """The node whose result a pick reads."""
    return value.args[0] if value.prim == "pick" else value
