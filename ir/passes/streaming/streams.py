"""Products that are never in memory: what makes them and what sums them as one group, where that takes less time.

    s = q @ k.T -> memory -> p = softmax(s) -> memory -> p @ v      becomes      one group (q, k, v) -> p @ v

A region is what virtual values connect: the products that make them, the groups between, the products and sums that end
them. Nothing virtual crosses its boundary. Its kernels form a tile of a virtual value at a time, for each direction in
which it is summed once more, and reach SHARE of the machine's arithmetic (assumed, not timed). The rule, as data:
`StreamEstimate`.

After `Fuse` and `place`, before `Products`: a product that is streamed is no product with neighbours any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...graph import Graph, Value
from ...types import Size
from ..cost import Hints, estimate, minimal_bytes
from ..fuse import Group, Step, View
from ..products import SHARE, Machine, name_of
from ..virtual import directions, virtual_values
from .alive import alive_share
from .pairs import pairs_in_memory
from .regions import Flow, Region

LIBRARY_SHARE = 0.75
"""Of the machine's arithmetic that a product of the library is taken to reach."""
EXPONENTIAL = ("exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sigmoid", "sin", "cos", "erf")
"""Primitives that are left to the unit for special functions."""
OF_PAIRS = "it is a sum over pairs, not a matmul; as `x @ y.mT` with sums of squares it could be, in other digits"
"""Of a sum over pairs that stays in memory."""
LAUNCH = 2e-6
"""Seconds that one launch more takes, where two ways differ in nothing else."""
SPECIAL = 16
"""Additions and multiplications of a multiprocessor in the time of one special function."""


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
        return f"stream {name_of(self.value)}: {'never in memory' if self.streamed else 'in memory'}, {self.reason}"


@dataclass(frozen=True)
class StreamEstimate:
    """Seconds of a region by its steps, and of kernels that stream it."""

    operations: int  # of the kernels: a product that two of them need is counted twice
    exponentials: int  # likewise
    moved: int  # bytes that the kernels move
    virtual: int  # bytes of the virtual values that are in memory without them
    kernels: int
    library: float  # seconds of the steps as they are
    rate: float
    special_rate: float
    bandwidth: float
    alive: float = 1.0  # the share of virtual elements that masks leave

    @property
    def own(self) -> float:
        """Seconds of the kernels."""
        limits = (
            self.alive * self.operations / (SHARE * self.rate), self.alive * self.exponentials / self.special_rate,
            self.moved / self.bandwidth,
        )  # fmt: skip
        return max(limits)

    @property
    def pays(self) -> bool:
        return self.own < self.library

    def __str__(self) -> str:
        masked = f", {self.alive:.0%} of it not masked" if self.alive < 1 else ""
        return (
            f"{self.virtual / 1e6:.1f} MB{masked}; modelled, {_time(self.own)} in kernels "
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
        pairs = pairs_in_memory(graph, self.hints)
        return steps, [*decisions, *(StreamDecision(v, frozenset(), None, OF_PAIRS) for v in pairs)]

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
        nodes = region.nodes()
        walks = directions(nodes, region.virtual)
        made = [v for nodes in walks for v in nodes]
        rate = self.machine.flops[region.products[0].dtype]
        return StreamEstimate(
            sum(self._number(operations(v)) for v in made if v.prim == "dot"),
            sum(self._number(v.aval.numel) for v in made if v.prim in EXPONENTIAL),
            self._number(minimal_bytes(group.graph)),
            sum(self._number(v.aval.nbytes) for v in region.crossing_virtual()),
            len(walks),
            sum(self._seconds(s) for s in region.members),
            rate, self.machine.flops["f32"] / SPECIAL, self.machine.bandwidth,
            alive_share(nodes, region.virtual, self.hints),
        )  # fmt: skip

    def seconds(self, steps: Sequence[Step], decisions: Sequence[StreamDecision]) -> float:
        """The model of a whole division, its launches as well."""
        streamed = {id(d.group): d.costs for d in decisions if d.group is not None and d.costs is not None}
        launched = [s for s in steps if not isinstance(s, View)]
        launches = sum(streamed[id(s)].kernels if id(s) in streamed else 1 for s in launched)
        return launches * LAUNCH + sum(streamed[id(s)].own if id(s) in streamed else self._seconds(s) for s in launched)

    def _seconds(self, step: Step) -> float:
        """A step as it is."""
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
