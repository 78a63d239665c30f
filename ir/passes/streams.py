"""Products that are never in memory: what makes them and what sums them as one group, where that takes less time.

    s = q @ k.T -> memory -> p = softmax(s) -> memory -> p @ v      becomes      one group (q, k, v) -> p @ v

A region is what virtual values connect: the products that make them, the groups between, the products and sums that end
them. Nothing virtual crosses its boundary. Its kernels form a tile of a virtual value at a time, for each direction in
which it is summed once more, and reach SHARE of the machine's arithmetic (assumed, not timed). The rule, as data:
`StreamEstimate`.

After `Fuse` and `place`, before `Products`: a product that is streamed is no product with neighbours any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import networkx as nx

from ..graph import Graph, Value
from ..prims import PRIMS
from ..rewrite import extract
from ..types import Size, contiguous_strides
from .cost import Hints, estimate, minimal_bytes
from .fuse import Extern, Group, Step, View
from .node_kinds import SOURCES, is_view
from .products import DTYPES, SHARE, Machine
from .virtual import directions, sums_of, virtual_values

LIBRARY_SHARE = 0.75
"""Of the machine's arithmetic that a product of the library is taken to reach."""
EXPONENTIAL = ("exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sigmoid", "sin", "cos", "erf")
"""Primitives that are left to the unit for special functions."""
SPECIAL = 16
"""Additions and multiplications of a multiprocessor in the time of one special function."""
FINISH = ("elementwise", "layout", "source", "reduce")
"""Families of groups that may be part of a region because they only read what it sums to."""


@dataclass(frozen=True)
class StreamDecision:
    """The fate of one region, and the reason."""

    value: Value  # its first virtual product
    products: frozenset[int]  # all of them, by id
    group: Group | None  # None: the steps stay as they were
    reason: str
    costs: StreamEstimate | None = None  # None: where they were not weighed

    @property
    def streamed(self) -> bool:
        return self.group is not None

    def refused(self, why: str) -> StreamDecision:
        """The same region where no kernels can be generated."""
        return StreamDecision(self.value, self.products, None, why)

    def __str__(self) -> str:
        origin = self.value.origin
        name = origin.name or origin.where or f"%{self.value.id}"
        return f"stream {name}: {'never in memory' if self.streamed else 'in memory'}, {self.reason}"


@dataclass(frozen=True)
class StreamEstimate:
    """Seconds of a region by its steps, and of kernels that stream it."""

    operations: int  # of the kernels: a product that two of them need is counted twice
    exponentials: int  # likewise
    moved: int  # bytes that the kernels move
    virtual: int  # bytes of the virtual values that are in memory without them
    library: float  # seconds of the steps as they are
    rate: float
    special_rate: float
    bandwidth: float

    @property
    def own(self) -> float:
        """Seconds of the kernels."""
        limits = (
            self.operations / (SHARE * self.rate), self.exponentials / self.special_rate, self.moved / self.bandwidth,
        )  # fmt: skip
        return max(limits)

    @property
    def pays(self) -> bool:
        return self.own < self.library

    def __str__(self) -> str:
        return (
            f"{self.virtual / 1e6:.1f} MB of it; modelled, {_time(self.own)} in kernels "
            f"and {_time(self.library)} by the library and kernels between"
        )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.2f} us"


@dataclass(frozen=True)
class Streams:
    """Steps -> steps. `apart`: ids of products that are to stay calls."""

    machine: Machine
    hints: Hints = field(default_factory=dict, hash=False)
    apart: frozenset[int] = frozenset()

    def __call__(self, graph: Graph, steps: Sequence[Step]) -> tuple[list[Step], list[StreamDecision]]:
        steps, decisions = list(steps), list[StreamDecision]()
        virtual = virtual_values(graph, self.hints)
        decided = set(self.apart)
        while (region := self._undecided(graph, steps, virtual, decided)) is not None:
            decided |= {v.id for v in region.products}
            if region.is_summed:
                decisions.append(decision := self._decide(region))
                steps = steps if decision.group is None else region.replaced_by(decision.group)
        return steps, decisions

    def _undecided(
        self, graph: Graph, steps: Sequence[Step], virtual: frozenset[int], decided: set[int]
    ) -> Region | None:
        """The first region of which nothing is decided yet."""
        flow = Flow(graph, steps)
        for members in flow.touching(virtual) if virtual else ():
            region = Region(flow, frozenset(members), virtual, self.hints)
            if region.products and not decided.intersection(v.id for v in region.products):
                return region.with_neighbours()
        return None

    def _decide(self, region: Region) -> StreamDecision:
        first, products = region.products[0], frozenset(v.id for v in region.products)
        if why := region.obstacle():
            return StreamDecision(first, products, None, why)
        group = region.group()
        costs = self.estimate(region, group)
        return StreamDecision(first, products, group if costs.pays else None, str(costs), costs)

    def estimate(self, region: Region, group: Group) -> StreamEstimate:
        """The model of both ways, at the hints."""
        made = [v for nodes in directions(region.nodes(), region.virtual) for v in nodes]
        rate = self.machine.flops[region.products[0].dtype]
        return StreamEstimate(
            sum(self._number(operations(v)) for v in made if v.prim == "dot"),
            sum(self._number(v.aval.numel) for v in made if v.prim in EXPONENTIAL),
            self._number(minimal_bytes(group.graph)),
            sum(self._number(v.aval.nbytes) for v in region.crossing_virtual()),
            sum(self._seconds(s) for s in region.members),
            rate, self.machine.flops["f32"] / SPECIAL, self.machine.bandwidth,
        )  # fmt: skip

    def seconds(self, steps: Sequence[Step], decisions: Sequence[StreamDecision]) -> float:
        """The model of a whole division."""
        streamed = {id(d.group): d.costs.own for d in decisions if d.group is not None and d.costs is not None}
        return sum(streamed[id(s)] if id(s) in streamed else self._seconds(s) for s in steps)

    def _seconds(self, step: Step) -> float:
        """A step as it is."""
        if isinstance(step, View):
            return 0.0
        if isinstance(step, Group):
            return self._number(minimal_bytes(step.graph)) / self.machine.bandwidth
        moved = sum(self._number(t.nbytes) for v in (*step.reads, *step.results) for t in v.avals)
        return max(self._multiplying(step.value), moved / self.machine.bandwidth)

    def _multiplying(self, value: Value) -> float:
        if value.prim != "dot" or value.dtype not in self.machine.flops:
            return 0.0
        return self._number(operations(value)) / (LIBRARY_SHARE * self.machine.flops[value.dtype])

    def _number(self, size: Size) -> int:
        return estimate(size, self.hints)


def operations(dot: Value) -> Size:
    """Additions and multiplications of a product."""
    pairs = zip(("x_axes", "y_axes"), dot.args, strict=True)
    sizes = {label: n for axes, arg in pairs for label, n in zip(dot.params[axes], arg.shape, strict=True)}
    total: Size = 2
    for n in sizes.values():
        total = total * n
    return total


# ------------------------------------------------------------------ who makes what
class Flow:
    """Who makes and who reads what, among steps; views are seen through."""

    def __init__(self, graph: Graph, steps: Sequence[Step]) -> None:
        self.graph, self.steps = graph, steps
        self.work = [s for s in steps if not isinstance(s, View)]
        self.makers = {v.id: at for at, s in enumerate(self.work) for v in s.results}
        self.order = nx.DiGraph()
        self.order.add_nodes_from(range(len(self.work)))
        self.order.add_edges_from((m, at) for at, s in enumerate(self.work) for m in self._makers(s.reads))

    def source(self, value: Value) -> Value:
        """The value in memory at the end of a chain of views."""
        while value.id not in self.makers and is_view(value):
            (value,) = value.args
        return value

    def sources(self, values: Iterable[Value]) -> list[Value]:
        """Those of some values, once each and without constants."""
        found = dict.fromkeys(map(self.source, values))
        return [v for v in found if v.prim not in SOURCES]

    def maker(self, value: Value) -> int | None:
        """The step that makes a value in memory; None for an input of the graph."""
        source = value.args[0] if value.prim == "pick" else value
        return self.makers.get(source.id)

    def _makers(self, values: Iterable[Value]) -> Iterator[int]:
        return (m for v in self.sources(values) if (m := self.maker(v)) is not None)

    def touching(self, virtual: frozenset[int]) -> list[list[int]]:
        """Steps that read or make virtual values, by what these connect."""
        touched = nx.Graph()
        for at, step in enumerate(self.work):
            if any(v.id in virtual for v in (*step.reads, *step.results)):
                touched.add_node(at)
                touched.add_edges_from((m, at) for m in self._makers(v for v in step.reads if v.id in virtual))
        return sorted(sorted(found) for found in nx.connected_components(touched))


# ------------------------------------------------------------------ regions
@dataclass(frozen=True)
class Region:
    """Steps that virtual values connect, by their places among the steps that are no views."""

    flow: Flow
    places: frozenset[int]
    virtual: frozenset[int]
    hints: Hints = field(hash=False)

    @property
    def members(self) -> list[Step]:
        return [self.flow.work[at] for at in sorted(self.places)]

    @property
    def products(self) -> list[Value]:
        """The products that are virtual."""
        made = [v for s in self.members for v in s.results]
        return [v for v in made if v.prim == "dot" and v.id in self.virtual]

    @property
    def is_summed(self) -> bool:
        """Something makes fewer elements of its virtual values: otherwise they are what the user asks for."""
        return bool(sums_of(self.nodes(), self.virtual))

    def nodes(self) -> list[Value]:
        """All nodes of the whole graph that it computes."""
        inside: dict[int, Value] = {}
        known = {v.id for v in self.inputs()}
        todo = [v for s in self.members for v in s.results]
        while todo:
            value = todo.pop()
            if value.id not in inside and value.id not in known and value.prim != "input":
                inside[value.id] = value
                todo.extend(value.args)
        return [inside[i] for i in sorted(inside)]

    # -------------------------------------------------------------- its ends
    def inputs(self) -> list[Value]:
        read = self.flow.sources(v for s in self.members for v in s.reads)
        return sorted((v for v in read if self.flow.maker(v) not in self.places), key=lambda v: v.id)

    def outputs(self) -> list[Value]:
        """The values that it makes and that a step outside reads, or the graph returns."""
        outside = [s for at, s in enumerate(self.flow.work) if at not in self.places]
        wanted = self.flow.sources([*(v for s in outside for v in s.reads), *self.flow.graph.results])
        return sorted((v for v in wanted if self.flow.maker(v) in self.places), key=lambda v: v.id)

    def crossing_virtual(self) -> list[Value]:
        """The virtual values that its steps hand to each other in memory."""
        return [v for s in self.members for v in s.results if v.id in self.virtual]

    # -------------------------------------------------------------- what joins it
    def with_neighbours(self) -> Region:
        """With the groups between its steps, those that make large operands for it alone, and those that finish it."""
        grown = self._with(self._between()) if all(self._is_group(at) for at in self._between()) else self
        while more := next(grown._joining(), None):
            grown = grown._with(more)
        return grown

    def _with(self, places: Iterable[int]) -> Region:
        return replace(self, places=self.places | frozenset(places))

    def _joining(self) -> Iterator[frozenset[int]]:
        """Steps outside that join, one at a time, as long as nothing comes between."""
        for at in sorted(self._beside()):
            step = self.flow.work[at]
            joins = isinstance(step, Group) and (self._finishes(step) or self._is_operand(step))
            if joins and not self._with([at])._between():
                yield frozenset([at])

    def _beside(self) -> set[int]:
        order = self.flow.order
        return {n for at in self.places for n in (*order.predecessors(at), *order.successors(at))} - self.places

    def _finishes(self, group: Group) -> bool:
        """It reads what the region sums to, and multiplies nothing itself."""
        makers = {self.flow.maker(v) for v in self.flow.sources(group.reads)}
        plain = all(PRIMS[v.prim].family in FINISH for v in group.graph.order())
        return plain and bool(makers & self.places) and makers <= self.places | {None}

    def _is_operand(self, group: Group) -> bool:
        """All that it makes is read here alone, and is a copy, or as large as a virtual value."""
        readers = self.flow.order.successors(self.flow.work.index(group))
        returned = self.flow.sources(self.flow.graph.results)
        if not set(readers) <= self.places or any(v in returned for v in group.results):
            return False
        least = min(self._elements(v) for v in self.products)
        copies = all(PRIMS[v.prim].family in ("layout", "source") for v in group.graph.order())
        return copies or all(self._elements(v) >= least for v in group.results)

    def _elements(self, value: Value) -> int:
        return estimate(value.aval.numel, self.hints)

    def _is_group(self, at: int) -> bool:
        return isinstance(self.flow.work[at], Group)

    def _between(self) -> set[int]:
        """Steps outside that need some of its steps, and are needed by others."""
        after = set().union(*(nx.descendants(self.flow.order, at) for at in self.places))
        before = set().union(*(nx.ancestors(self.flow.order, at) for at in self.places))
        return (after & before) - self.places

    # -------------------------------------------------------------- whether it may be one
    def obstacle(self) -> str:
        """The reason why its steps cannot be one group; "" where they can."""
        if (dtype := next((v.dtype for v in self.products if v.dtype not in DTYPES), None)) is not None:
            return f"{dtype} is multiplied by the library"
        if (result := next((v for v in self.outputs() if v.id in self.virtual), None)) is not None:
            return f"{_name(result)} is returned, or read by what is no kernel"
        called = [s.value for s in self.members if isinstance(s, Extern) and s.value.prim != "dot"]
        if called:
            return f"{_name(called[0])} reads it from memory"
        if between := self._between():
            return f"{_name(self.flow.work[min(between)].results[0])} comes between, and is no part of its kernels"
        return self._effects()

    def _effects(self) -> str:
        """An effect between its first and its last step stays where it is."""
        span = self.flow.work[min(self.places) : max(self.places)]
        effects = [s for s in span if isinstance(s, Extern) and PRIMS[s.value.prim].effect]
        return f"{_name(effects[0].value)} runs in between" if effects else ""

    # -------------------------------------------------------------- as one
    def group(self) -> Group:
        """All of it in one graph."""
        inputs, outputs = self.inputs(), self.outputs()
        name = next((s.graph.name for s in self.members if isinstance(s, Group)), self.flow.graph.name)
        layouts = _layouts(self.flow.work)
        strides = [layouts.get(v.id) or self._strides(v) for v in outputs]
        graph = extract(outputs, inputs, name=name, strides=strides, layouts=layouts)
        return Group(graph, tuple(inputs), tuple(outputs))

    def _strides(self, value: Value) -> tuple[Size, ...]:
        """The layout of what a product made until now."""
        returned = self.flow.graph.strides_of_output(value)
        return contiguous_strides(value.shape) if returned is None or 0 in returned else returned

    def replaced_by(self, group: Group) -> list[Step]:
        """The steps with the group in the place of its last one; what needs it comes behind it."""
        last = self.flow.steps.index(self.flow.work[max(self.places)])
        needs = set().union(*(nx.descendants(self.flow.order, at) for at in self.places))
        late = [self.flow.work[at] for at in sorted(needs - self.places)]
        inside = self.members
        before = [s for s in self.flow.steps[:last] if s not in inside and s not in late]
        delayed = [s for s in self.flow.steps[:last] if s in late]
        return _views_in_order(self.flow.graph, [*before, group, *delayed, *self.flow.steps[last + 1 :]])


def _views_in_order(graph: Graph, steps: Sequence[Step]) -> list[Step]:
    """The steps, each view that is still read where what it looks at is in memory."""
    views = {s.value.id: s for s in steps if isinstance(s, View)}
    made = {v.id for s in steps if not isinstance(s, View) for v in s.results}
    placed: set[int] = set()

    def needed(values: Iterable[Value]) -> Iterator[Step]:
        for value in values:
            if value.id in views and value.id not in made and value.id not in placed:
                yield from needed(value.args)
                placed.add(value.id)
                yield views[value.id]

    ordered: list[Step] = []
    for step in steps:
        if not isinstance(step, View):
            ordered += [*needed(step.reads), step]
    return [*ordered, *needed(graph.results)]


def _layouts(steps: Iterable[Step]) -> dict[int, tuple[Size, ...] | None]:
    """The strides of what groups compute."""
    groups = [s for s in steps if isinstance(s, Group)]
    return {v.id: s for g in groups for v, s in zip(g.outputs, g.graph.output_strides, strict=True)}


def _name(value: Value) -> str:
    return f"`{value.origin.name or value.params.get('op') or value.prim}`"
