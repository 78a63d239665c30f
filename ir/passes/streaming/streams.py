"""Products that are never in memory: what makes them and what sums them as one group, where that takes less time.

    s = q @ k.T -> memory -> p = softmax(s) -> memory -> p @ v      becomes      one group (q, k, v) -> p @ v

A region is what virtual values connect: the products that make them, the groups between, the products and sums that end
them. Nothing virtual crosses its boundary. Its kernels form a tile of a virtual value at a time, for each direction in
which it is summed once more, and reach SHARE of the machine's arithmetic (assumed, not timed). The rule, as data:
`StreamEstimate`.

After `Fuse` and `place`, before `Products`: a product that is streamed is no product with neighbours any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from ...graph import Graph, Value
from ...rewrite import nodes_between
from ...text.source_names import source_name, source_place
from ...text.text import symbols_of
from ...types import LOW_FLOATS, Size
from ..cost import TYPICAL, Hints, estimate, minimal_bytes
from ..fuse import Group, Step, View
from ..products import SHARE, Machine
from ..virtual import directions, is_source, large_values, virtual_values
from .alive import alive_share
from .copies import parts_apart
from .in_place import steps_of_slab
from .pairs import EXPONENTIAL, REDUCES, operations_of_pairs, powers_of_pairs
from .regions import Flow, Region
from .slabs import Slabs, Walked, extra_bytes, held_by_steps, summed_products, walked

LIBRARY_SHARE = 0.75
"""Of the machine's arithmetic that a product of the library is taken to reach."""
OF_PAIRS = "it is a sum over pairs, not a matmul, "
"""Of a sum over pairs that stays as it is."""
READ_FROM_MEMORY = "which is in memory"
"""Of the operands of a sum over pairs, where one is as large as that."""
LAUNCH = 2e-6
"""Seconds that one launch more takes, where two ways differ in nothing else."""
PRICE = 1.1
"""How many times as long slabs may take where the bound of their memory is nobody's wish."""
MEMORY_PRICE = 1.5
"""How many times as long, by the model, kernels on tensor cores may take that have none of it in memory, where it would
take more than a slab may and slabs do not keep to that: what they reach of the device is assumed with caution."""
NO_KERNELS = "no kernels are made for it"
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
    walked: Walked | None = None  # how it would be walked in slabs, where no kernels are
    slabs: SlabEstimate | None = None  # None: it is not
    splits: int = 1  # the parts of the stream that programs share, of the kernel that has most
    names: tuple[str, ...] = ()  # of its virtual values, in the user's source
    unwalked: str = ""  # the reason why it is not, though it would fill memory
    added: frozenset[int] = frozenset()  # ids of scatters whose sums are in its kernels
    pairs: frozenset[int] = frozenset()  # ids of the sums over pairs among its products

    @property
    def streamed(self) -> bool:
        return self.group is not None

    @property
    def fills_memory(self) -> bool:
        """Something virtual is in memory as a whole: of sums over pairs that stay, where row kernels write them."""
        if self.pairs and not self.products:
            return self.costs is None or self.costs.virtual > 0
        return bool(self.products) and not self.streamed and self.slabs is None

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups in the place of its steps; none where they stay."""
        if self.slabs is not None and self.walked is not None:
            return self.walked.groups
        return () if self.group is None else (self.group,)

    def refused(self, why: str) -> StreamDecision:
        """The same region where no kernels can be generated."""
        return StreamDecision(self.value, self.products, None, why, names=self.names)

    def __str__(self) -> str:
        """`stream scores, weights (attention.py:18): never in memory, ..`"""
        names, place = ", ".join(self.names or (source_name(self.value),)), source_place(self.value)
        where = f" ({place})" if place else ""
        figures = self.costs is not None and not self.streamed and self.slabs is None
        of_pairs = self.costs is not None and self.costs.pairs > 0
        left = ": the products stay with the library" if figures and not of_pairs else ""
        in_memory = "as it is" if of_pairs and self.costs and not self.costs.virtual else "in memory"
        kept = "in slabs" if self.slabs is not None else "never in memory" if self.streamed else in_memory
        divided = f", the stream in {self.splits} splits, merged" if self.splits > 1 else ""
        return f"stream {names}{where}: {kept}{divided}, {self.reason}{left}"


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
    pairs: float = 0.0  # seconds of sums over pairs, at the machine's peak

    @property
    def own(self) -> float:
        """Seconds of the kernels."""
        limits = (
            self.alive * (self.operations / self.rate + self.pairs) / SHARE,
            self.alive * self.exponentials / self.special_rate, self.moved / self.bandwidth,
        )  # fmt: skip
        return max(limits)

    @property
    def pays(self) -> bool:
        return self.own < self.library

    def __str__(self) -> str:
        masked = f", {self.alive:.0%} of it not masked" if self.alive < 1 else ""
        return (
            f"{_size(self.virtual)}{masked}; modelled, {_time(self.own)} in kernels "
            f"and {_time(self.library)} by {'row kernels' if self.pairs else 'the library and kernels between'}"
        )


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e10 else f"{count / 1e6:.1f} MB"


@dataclass(frozen=True)
class SlabEstimate:
    """A region that is walked in slabs, at the hints."""

    dim: sympy.Symbol
    rows: int  # of a slab
    every: int
    count: int  # slabs
    held: int  # bytes between the steps of a slab
    at_once: int  # the same of all rows
    extra: int  # bytes that slabs after the first move besides
    launches: int  # of a slab
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.count} of {self.rows} rows, {self.held / 1e6:.1f} MB at a time instead of {self.at_once / 1e6:.1f}"
            f"; modelled, {_time(self.seconds)}"
        )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.2f} us"


def _nothing_known(_: Group) -> None:
    return None


def _has_pairs(group: Group, hints: Hints) -> bool:
    """What it sums is made of its inputs, and is none."""
    virtual = virtual_values(group.graph, hints, pairs=True)
    return any(v.prim in REDUCES and is_source(v, virtual) for v in group.graph.order())


@dataclass(frozen=True)
class Streams:
    """Steps -> steps.

    kernels: whether there are any; refused: by ids of products, why their region has none; or of a scatter, why it has.
    limit: bytes that a region without kernels may hold, None: any number; what holds more is walked in slabs where that
    takes at most `price` times as long. held: what a slab holds, by its graph. moved: bytes that a group reads and
    writes where no kernel walks its sums over pairs.
    """

    machine: Machine
    hints: Hints = field(default_factory=dict, hash=False)
    kernels: bool = True
    refused: Mapping[int, str] = field(default_factory=dict, hash=False)
    limit: int | None = None
    price: float = math.inf
    held: Callable[[Graph], tuple[Size, ...]] = held_by_steps
    moved: Callable[[Group], tuple[int, int] | None] = _nothing_known

    def __call__(self, graph: Graph, steps: Sequence[Step]) -> tuple[list[Step], list[StreamDecision]]:
        found, decisions = self._with_pairs(graph, list(steps))
        decided = {i for d in decisions if d.streamed for i in d.products}
        for virtual, made in self._virtual(graph):
            while (region := self._undecided(graph, found, virtual, decided)) is not None:
                decided |= {v.id for v in region.products}
                if region.is_summed:
                    decision = self._decide(region, made)
                    found = self._replaced(found, region, decision)
                    decisions += [decision] if made or decision.walked or decision.unwalked else []
        return found, decisions

    def _replaced(self, steps: list[Step], region: Region, decision: StreamDecision) -> list[Step]:
        if not decision.groups:
            return steps
        replaced = region.with_bins(self.refused) if decision.added else region
        return replaced.replaced_by(*decision.groups)

    def _with_pairs(self, graph: Graph, steps: list[Step]) -> tuple[list[Step], list[StreamDecision]]:
        """Regions of sums over pairs first, with the matmuls that are in them; these alone where that is no good."""
        decisions, decided = list[StreamDecision](), set[int]()
        virtual = virtual_values(graph, self.hints, pairs=True) if self.kernels else frozenset[int]()
        if not any(v.prim in REDUCES and is_source(v, virtual) for v in graph.order()):
            return steps, decisions
        while (region := self._undecided(graph, steps, virtual, decided)) is not None:
            decided |= {v.id for v in region.products}
            if region.pairs and region.is_summed:
                decisions.append(self._decide_pairs(region))
                steps = self._replaced(steps, region, decisions[-1])
        return steps, decisions

    def _decide_pairs(self, region: Region) -> StreamDecision:
        """A region with sums over pairs as one group, or as it is; what is added by an index stays outside."""
        first, names = region.pairs[0], tuple(region.names())
        products, pairs = (frozenset(v.id for v in found) for found in (region.products, region.pairs))
        why = next((self.refused[i] for i in pairs if i in self.refused), "") or region.obstacle()
        if why:
            return StreamDecision(first, frozenset(), None, OF_PAIRS + why, names=names, pairs=pairs)
        group = region.group()
        if not _has_pairs(group, self.hints):
            return StreamDecision(first, frozenset(), None, OF_PAIRS + READ_FROM_MEMORY, names=names, pairs=pairs)
        costs = self.estimate(region, group)
        decision = StreamDecision(first, products, group, str(costs), costs, names=names, pairs=pairs)
        if costs.virtual and (costs.pays or self._saves_memory(region, decision)):
            return decision
        return StreamDecision(first, frozenset(), None, str(costs), costs, names=names, pairs=pairs)

    def _virtual(self, graph: Graph) -> Iterator[tuple[frozenset[int], bool]]:
        """Virtual values of which kernels may be made; then those of which they are not, and that fill memory."""
        yield virtual_values(graph, self.hints), self.kernels
        if self.limit is not None:
            yield large_values(graph, self.hints, self.limit), False

    def _undecided(
        self, graph: Graph, steps: Sequence[Step], virtual: frozenset[int], decided: set[int]
    ) -> Region | None:
        """The first region of which nothing is decided yet."""
        flow = Flow(graph, parts_apart(graph, steps, virtual))
        for members in flow.touching(virtual) if virtual else ():
            region = Region(flow, frozenset(members), virtual, self.hints)
            if region.products and not decided.intersection(v.id for v in region.products):
                return region.with_neighbours()
        return None

    def _decide(self, region: Region, made: bool) -> StreamDecision:
        """made: whether there may be kernels."""
        first, products = region.products[0], frozenset(v.id for v in region.products)
        names = tuple(region.names())
        costs, streamed = None, None
        summing = region.with_bins(self.refused) if made else region
        if not (why := self._why_no_kernels(products, made) or summing.obstacle()):
            group = summing.group()
            costs = self.estimate(summing, group)
            streamed = StreamDecision(first, products, group, str(costs), costs, names=names, added=summing.added)
            if costs.pays:
                return streamed
        decision = StreamDecision(first, products, None, why or str(costs), costs, names=names)
        if self.limit is None:
            return decision
        otherwise = self._in_slabs(decision, region, self.limit)
        is_bounded = otherwise.slabs is not None and otherwise.slabs.held <= self.limit
        return streamed if streamed and not is_bounded and self._saves_memory(region, streamed) else otherwise

    def _saves_memory(self, region: Region, streamed: StreamDecision) -> bool:
        """It would hold more than a slab may, and kernels on tensor cores hardly take longer, by the model."""
        costs = streamed.costs
        if costs is None or self.limit is None:
            return False
        is_fast = all(v.dtype in LOW_FLOATS for v in region.products if v.prim == "dot")
        return is_fast and costs.virtual > self.limit and costs.own <= MEMORY_PRICE * costs.library

    def _why_no_kernels(self, products: frozenset[int], made: bool) -> str:
        """The reason why a region of these products has none; "" where it may have."""
        return next((self.refused[i] for i in products if i in self.refused), "") if made else NO_KERNELS

    def _in_slabs(self, decision: StreamDecision, region: Region, limit: int) -> StreamDecision:
        """A region without kernels in slabs, where it would hold more than the limit."""
        found = walked(region, self.hints, limit, self.held)
        if isinstance(found, str):
            too_large = sum(self._number(v.aval.nbytes) for v in region.crossing_virtual()) > limit
            if not too_large:
                return decision
            why = f"; not in slabs of rows: {found}" if found != decision.reason else ""
            return replace(decision, reason=decision.reason + why, unwalked=found)
        ways = [(way, self._slab_estimate(way, limit)) for way in found]
        first, slabs = ways[0]
        if slabs.at_once <= limit:
            return replace(decision, walked=first)
        most = self.price * sum(map(self._seconds, region.members))
        for way, slabs in ways:
            if slabs.seconds <= most and slabs.count > 1:
                reason = f"{slabs}; in one piece: {decision.reason}"
                return replace(decision, walked=way, slabs=slabs, reason=reason)
        why = f"it would take {_time(ways[0][1].seconds)}, for {ways[0][1].held / 1e6:.1f} MB at a time"
        return replace(decision, walked=first, reason=f"{decision.reason}; not in slabs of rows: {why}", unwalked=why)

    def _slab_estimate(self, found: Walked, limit: int) -> SlabEstimate:
        slabs = found.slabs
        sizes = {slabs.symbol: TYPICAL, **self.hints}
        rows, count, extra = slabs.rows(sizes, limit), slabs.slabs(sizes, limit), extra_bytes(slabs, sizes, limit)
        inner = [s for s in steps_of_slab(slabs.group.graph)[0] if not isinstance(s, View)]
        one = replace(self, hints=slabs.sizes(sizes, rows))
        added = sum(self._number(v.aval.nbytes) for v in summed_products(slabs)) / self.machine.bandwidth
        own = count * (sum(map(one._seconds, inner)) + (len(inner) - 1) * LAUNCH) + (count - 1) * (added + LAUNCH)
        return SlabEstimate(
            slabs.symbol, rows, sizes[slabs.symbol], count, slabs.held_at(sizes, rows), slabs.held_at(sizes), extra,
            len(inner), own + sum(map(self._seconds, (*found.before, *found.after))),
        )  # fmt: skip

    def estimate(self, region: Region, group: Group) -> StreamEstimate:
        """The model of both ways, at the hints."""
        nodes, virtual = group.graph.order(), virtual_values(group.graph, self.hints, bool(region.pairs))
        walks = directions(nodes, virtual)
        made = [v for nodes in walks for v in nodes]
        pairs = [v for v in made if v.prim != "dot" and is_source(v, virtual)]
        dots = [v for v in made if v.prim == "dot"]
        moved = [self.moved(s) if region.pairs and isinstance(s, Group) else None for s in region.members]
        seconds = [self._as_it_is(s, region, n) for s, n in zip(region.members, moved, strict=True)]
        return StreamEstimate(
            sum(self._number(operations(v)) for v in dots),
            sum(self._number(v.aval.numel) for v in made if v.prim in EXPONENTIAL),
            self._number(minimal_bytes(group.graph)),
            self._in_memory(region, moved),
            len(walks),
            sum(seconds),
            self.machine.flops[next((v.dtype for v in (*region.products, *dots) if v.prim == "dot"), "f32")],
            self.machine.flops["f32"] / SPECIAL, self.machine.bandwidth,
            alive_share(nodes, virtual, self.hints),
            sum(operations_of_pairs(v, self.hints) for v in pairs) / self.machine.flops["f32"],
        )  # fmt: skip

    def _in_memory(self, region: Region, moved: Sequence[tuple[int, int] | None]) -> int:
        """Bytes of what kernels that walk leave out of memory: of sums over pairs none, where nothing writes them."""
        virtual = sum(self._number(v.aval.nbytes) for v in region.crossing_virtual())
        known = [n for n, s in zip(moved, region.members, strict=True) if isinstance(s, Group)]
        if any(v.prim == "dot" for v in region.products) or None in known:
            return virtual
        written = sum(n[1] for n in known if n is not None)
        return min(virtual, written) if written >= min(self._number(v.aval.nbytes) for v in region.pairs) else 0

    def _as_it_is(self, step: Step, region: Region, moved: tuple[int, int] | None) -> float:
        """Seconds of a step; a row kernel that makes sums over pairs takes as long as these, and reads them again."""
        inside = {v.id for v in region.pairs}
        if not isinstance(step, Group) or not inside:
            return self._seconds(step)
        known = {v.id for v in (*step.reads, *region.flow.sources(step.reads))}
        pairs = [v for v in nodes_between(step.results, known) if v.id in inside]
        if not pairs:
            return self._seconds(step)
        peak = self.machine.flops["f32"]
        counts = (sum(count(v, self.hints) for v in pairs) for count in (operations_of_pairs, powers_of_pairs))
        made = max(n / rate for n, rate in zip(counts, (SHARE * peak, peak / SPECIAL), strict=True))
        size = sum(self._number(v.aval.nbytes) for v in pairs)
        read, written = moved or (size, size)
        return max(made, written / self.machine.bandwidth) + read / self.machine.bandwidth

    def seconds(self, steps: Sequence[Step], decisions: Sequence[StreamDecision]) -> float:
        """The model of a whole division, its launches as well."""
        streamed = {id(d.group): d.costs for d in decisions if d.group is not None and d.costs is not None}
        in_slabs = [d for d in decisions if d.slabs is not None]
        apart = {id(g) for d in in_slabs for g in d.groups}
        launched = [s for s in steps if not isinstance(s, View) and id(s) not in apart]
        launches = sum(streamed[id(s)].kernels if id(s) in streamed else 1 for s in launched)
        launches += sum(len(d.groups) - 1 + d.slabs.launches for d in in_slabs if d.slabs is not None)
        own = sum(streamed[id(s)].own if id(s) in streamed else self._seconds(s) for s in launched)
        return launches * LAUNCH + own + sum(d.slabs.seconds for d in in_slabs if d.slabs is not None)

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


def slabs_at(steps: Sequence[Step], decisions: Sequence[StreamDecision]) -> dict[int, Slabs]:
    """The groups among steps that are walked in slabs, by their places."""
    found = {id(d.walked.slabs.group): d.walked.slabs for d in decisions if d.walked and d.slabs is not None}
    return {at: found[id(s)] for at, s in enumerate(steps) if id(s) in found}


def held_in_one_piece(
    graph: Graph, decisions: Sequence[StreamDecision], hints: Hints, limit: int | None
) -> tuple[Size, ...]:
    """Bytes of products that are in memory, and of their regions, which might be in slabs where they are larger."""
    if limit is None:
        return ()
    decided = {i for d in decisions if d.slabs is not None or d.group is not None for i in d.products}
    products = [v.aval.nbytes for v in graph.order() if v.prim == "dot" and v.id not in decided]
    regions = [size for d in decisions if d.walked and d.slabs is None for size in d.walked.slabs.held]
    return tuple(n for n in dict.fromkeys((*products, *regions)) if symbols_of((n,)) and estimate(n, hints) <= limit)


def operations(dot: Value) -> Size:
    """Additions and multiplications of a product."""
    pairs = zip(("x_axes", "y_axes"), dot.args, strict=True)
    sizes = {label: n for axes, arg in pairs for label, n in zip(dot.params[axes], arg.shape, strict=True)}
    total: Size = 2
    for n in sizes.values():
        total = total * n
    return total
