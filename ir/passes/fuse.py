"""Partition a graph into steps: groups that become kernels, calls of what is not ours, and views that cost nothing.

A group is as large as legality allows: everything connected that no extern node separates, and beside it what reads the
same value over the same space. The generator cuts further where one launch cannot do it. What crosses a boundary is
written to memory, unless reading its sources again moves no more bytes; then the consumer computes it once more.

After all passes over nodes: what follows (`place`, `Products`, codegen) works on steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..graph import Graph, Value
from ..infer import sizes_equal
from ..prims import PRIMS
from ..rewrite import extract
from ..switches import is_on
from ..types import Size, contiguous_strides, elements_in_memory, product
from .clusters import UNBOUNDED, Bound, fused_clusters
from .cost import Hints, estimate
from .node_kinds import NodeKinds

CHEAP = ("elementwise", "layout", "source")
MOST_RECOMPUTED = 32


@dataclass(frozen=True)
class Group:
    """Fusible nodes that run together. `graph` stands alone; `inputs` and `outputs` are its ends in the whole graph.

    pairs: its kernels make sums over pairs tile by tile, as they make matmuls that are never in memory.
    """

    graph: Graph
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    pairs: bool = False

    @property
    def reads(self) -> tuple[Value, ...]:
        return self.inputs

    @property
    def results(self) -> tuple[Value, ...]:
        return self.outputs


@dataclass(frozen=True)
class _Single:
    """A step that is one node."""

    value: Value

    @property
    def reads(self) -> tuple[Value, ...]:
        return self.value.args

    @property
    def results(self) -> tuple[Value, ...]:
        return (self.value,)


@dataclass(frozen=True)
class Extern(_Single):
    """One node that is called as it is. Results of a node with several are read through its picks."""


@dataclass(frozen=True)
class View(_Single):
    """One layout node on something in memory, or a constant: torch does it, and no kernel is generated."""


Step: TypeAlias = Group | Extern | View


@dataclass(frozen=True)
class Fuse:
    """Graph -> steps in an order that runs. `apart`: ids of fusible values that are to be called instead.

    `hints` are sizes to compare costs at. bound: bytes that a group may keep waiting for it because that saves moving.
    at_all: nodes that share nothing are in one group, too.
    """

    apart: frozenset[int] = frozenset()
    hints: Hints = field(default_factory=dict, hash=False)
    bound: Bound = UNBOUNDED
    at_all: bool = False

    def __call__(self, graph: Graph) -> list[Step]:
        return list(Partition(graph, self.apart, self.hints, self.bound, self.at_all).steps())


class Partition:
    """Clusters of nodes, and what is stored between them: the results, and what another step reads."""

    def __init__(
        self, graph: Graph, apart: frozenset[int], hints: Hints, bound: Bound = UNBOUNDED, at_all: bool = False
    ) -> None:
        self.graph, self.hints, self.bound = graph, hints, bound
        self.layouts = graph.strides_of_outputs()
        self.kinds = NodeKinds(graph, apart)
        self.clusters = fused_clusters(self.kinds, hints, bound, at_all)
        self.stored: dict[int, Value] = {}
        self._stored_by: dict[int | None, dict[int, Value]] = {}
        self._store_results()

    # ------------------------------------------------------------------ what is in memory
    def _store_results(self) -> None:
        """Results that are computed here, and what externs look at; a view of something in memory stays a view."""
        kinds, results = self.kinds, dict.fromkeys(self.graph.results)
        read = [kinds.base(a) for v in kinds.externs for a in v.args]
        for value in (*results, *read):
            if kinds.is_core(value):
                self._store(value)
        # after the bases: a view of a stored one needs no memory of its own
        for value in results:
            base = kinds.base(value)
            if kinds.is_free(value) and kinds.is_core(base) and (base.id not in self.stored or base in results):
                self._store(base if self._only_repeats(value, base) else value)

    def _store(self, value: Value) -> None:
        self.stored[value.id] = value
        self._stored_by.setdefault(self.clusters.of(self.kinds.base(value)), {})[value.id] = value

    def _only_repeats(self, value: Value, base: Value) -> bool:
        """A result that leaves the graph as an expanded view of what it looks at: no element is written twice."""
        strides = self.layouts.get(value)
        if strides is None or all(s != 0 for s in strides):
            return False
        return sizes_equal(elements_in_memory(value.shape, strides), product(base.shape))

    def inputs(self, outputs: Iterable[Value], cluster: int) -> list[Value]:
        """The values that a cluster reads to compute `outputs`; one of another cluster is stored, or computed again."""
        reads: dict[int, Value] = {}
        visited: set[int] = set()
        todo = list(outputs)
        while todo:
            value = todo.pop()
            if value.id in visited:
                continue
            visited.add(value.id)
            if self.kinds.in_memory(value):
                reads[value.id] = value
            elif self.kinds.is_free(value) or self.clusters.of(value) == cluster or self._is_recomputed(value):
                todo.extend(value.args)
            else:
                reads[value.id] = value
                self._store(value)
        return [reads[i] for i in sorted(reads)]

    def _is_recomputed(self, value: Value) -> bool:
        """Computing a value of another cluster again moves no more bytes than having it in memory."""
        if not (is_on("fuse") and is_on("duplicate")):
            return False
        # from the value down to what is in memory: cheap nodes only, and few of them
        roots: dict[int, Value] = {}
        count, todo = 0, [value]
        while todo:
            at = todo.pop()
            if self.kinds.in_memory(at) or (at.id in self.stored and at != value):
                roots[at.id] = at
                continue
            count += 1
            if PRIMS[at.prim].family not in CHEAP or count > MOST_RECOMPUTED:
                return False
            todo.extend(at.args)
        reading = sum(estimate(r.aval.nbytes, self.hints) for r in roots.values())
        is_held_anyway = value.id in self.stored or not self.bound.holds(r for r in roots.values() if r.prim != "input")
        return reading <= estimate(value.aval.nbytes, self.hints) * (1 if is_held_anyway else 2)

    # ------------------------------------------------------------------ steps
    def steps(self) -> Iterator[Step]:
        emitted: set[int] = set()
        # groups first: which values are stored is known once every reader has been asked
        groups = self._groups()
        for cluster in self.clusters.ordered():
            value = self.kinds.nodes[cluster]
            if self.kinds.is_extern(value):
                yield from self._views(value.args, emitted)
                yield Extern(value)
            elif cluster in groups:
                yield groups[cluster]
        yield from self._views(self.graph.results, emitted)

    def _views(self, values: Sequence[Value], emitted: set[int]) -> Iterator[View]:
        """Views that lead to these values from what is in memory; each once."""
        for value in values:
            if self.kinds.is_free(value) and value.id not in self.stored and value.id not in emitted:
                yield from self._views(value.args, emitted)
                emitted.add(value.id)
                yield View(value)

    def _groups(self) -> dict[int, Group]:
        """Later clusters first, so that an earlier one knows all that is read of it."""
        ends: dict[int, tuple[list[Value], list[Value]]] = {}
        for cluster in reversed(self.clusters.ordered()):
            if outputs := [v for _, v in sorted(self._stored_by.get(cluster, {}).items())]:
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
        return self.layouts.get(value) if value.id in self.stored else None
