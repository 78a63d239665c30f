"""Regions walked in slabs: what would fill memory is made for some rows at a time, by the library and row kernels.

    z = x @ w.T [n, v] -> memory -> loss      becomes      for rows in slabs of n: z = x[rows] @ w.T -> memory -> loss

Which dim is walked is told by what it costs: what does not have it is read once a slab, and a sum over it is read and
written once a slab. The memory of a slab is bounded; how many rows that are is known at the sizes of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import sympy

from ...graph import Graph, Value
from ...prims import PRIMS
from ...sharding.rules import unit
from ...sharding.scaling import NotDivisible
from ...text.text import symbols_of
from ...types import Size
from ..cost import TYPICAL, Hints, estimate
from ..fuse import Group
from ..node_kinds import is_view
from ..place import is_plain_product
from .in_place import steps_of_slab
from .regions import Flow, Region
from .walk import Walk

ALIGNED = 16
"""Slabs of so many rows, or a multiple of it: rows behind them begin where wide accesses may."""


@dataclass(frozen=True)
class End:
    """An input or output of a slab: the axis that is divided, and its elements for each row; None: all of it.

    An output without an axis is a sum over the rows.
    """

    axis: int | None
    unit: Size = 1


@dataclass(frozen=True)
class Slabs:
    """A group that is walked along a dim.

    count, first: the symbols of the number of all rows, and of the place of a slab's first one, where these are
    computed with; else None.
    """

    group: Group
    symbol: sympy.Symbol
    count: sympy.Symbol | None
    first: sympy.Symbol | None
    inputs: tuple[End, ...]
    outputs: tuple[End, ...]
    held: tuple[Size, ...]
    """Bytes between its steps that are in memory at once, as each step runs, at any number of rows."""

    def sizes(self, sizes: Hints, rows: int | None = None, start: int = 0) -> dict[sympy.Symbol, int]:
        """The sizes of a slab; by default of all rows at once."""
        found = {**sizes, self.symbol: sizes[self.symbol] if rows is None else rows}
        found |= {} if self.count is None else {self.count: sizes[self.symbol]}
        return found if self.first is None else {**found, self.first: start}

    def held_at(self, sizes: Hints, rows: int | None = None) -> int:
        """The most bytes that lie between the steps of a slab at once."""
        at = self.sizes(sizes, rows)
        return max((estimate(size, at) for size in self.held), default=0)

    def rows(self, sizes: Hints, limit: int) -> int:
        """The rows of a slab whose values between steps take `limit` bytes at most, if one row does."""
        every = sizes[self.symbol]
        if every <= 1 or (all_at_once := self.held_at(sizes)) <= limit:
            return max(1, every)
        one = self.held_at(sizes, 1)
        fitting = max(1, 1 + (limit - one) * (every - 1) // max(1, all_at_once - one))
        return _even(every, fitting // ALIGNED * ALIGNED or fitting)

    def slabs(self, sizes: Hints, limit: int) -> int:
        """The number of slabs."""
        return max(1, -(-sizes[self.symbol] // self.rows(sizes, limit)))


def _even(every: int, rows: int) -> int:
    """No more rows, and no more slabs, but slabs alike: the last one is not a small rest."""
    step = ALIGNED if rows % ALIGNED == 0 else 1
    each = -(-every // -(-every // rows))
    return -(-each // step) * step


@dataclass(frozen=True)
class Walked:
    """A region as the steps that it becomes: groups before the slabs, the slabs, groups after them."""

    before: tuple[Group, ...]
    slabs: Slabs
    after: tuple[Group, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        return (*self.before, self.slabs.group, *self.after)


def walked(
    region: Region, hints: Hints, limit: int, held: Callable[[Graph], tuple[Size, ...]]
) -> list[Walked] | str:
    """The region in slabs along each dim that it can be, the best first; or the reason why not.

    held: the memory of a slab, by its graph.
    """
    if why := region.need_of_memory():
        return why
    symbols = list(dict.fromkeys(s for v in region.inputs() for s in v.shape if isinstance(s, sympy.Symbol)))
    reasons: list[str] = []
    found: list[Walked] = []
    for symbol in symbols:
        try:
            found.append(_along(region, symbol, held))
        except NotDivisible as error:
            reasons.append(str(error))
    if not found:
        return f"none of its dims can be walked: {'; '.join(dict.fromkeys(reasons)) or 'their sizes are constants'}"
    return sorted(found, key=lambda w: _rank(w.slabs, hints, limit))


def _along(region: Region, symbol: sympy.Symbol, held: Callable[[Graph], tuple[Size, ...]]) -> Walked:
    walk = Walk(region, symbol)
    before, group, after = walk.groups()
    used = {s for v in group.graph.order() if v.prim == "full" for s in symbols_of(v.params["value"])}
    count, first = (s if s in used else None for s in (walk.count, walk.first))
    inputs, outputs = (tuple(_end(v, walk, symbol) for v in values) for values in (group.inputs, group.outputs))
    slabs = Slabs(group, symbol, count, first, inputs, outputs, held(group.graph))
    return Walked(tuple(before), slabs, tuple(after))


def _end(value: Value, walk: Walk, symbol: sympy.Symbol) -> End:
    state = walk.states[value.id]
    return End(state, unit(value, symbol)) if isinstance(state, int) else End(None)


def _rank(slabs: Slabs, hints: Hints, limit: int) -> tuple[bool, int]:
    """Whether a single row is too large, and the bytes that slabs move beyond those of the region at once."""
    known = {slabs.symbol: TYPICAL, **hints}
    return slabs.held_at(known, slabs.rows(known, limit)) > limit, extra_bytes(slabs, known, limit)


def extra_bytes(slabs: Slabs, sizes: Hints, limit: int) -> int:
    """Bytes that slabs after the first one move besides: inputs that are whole, and sums over the rows, in and out."""
    whole = [v.aval.nbytes for v, end in zip(slabs.group.inputs, slabs.inputs, strict=True) if end.axis is None]
    sums = [2 * v.aval.nbytes for v, end in zip(slabs.group.outputs, slabs.outputs, strict=True) if end.axis is None]
    return (slabs.slabs(sizes, limit) - 1) * sum(estimate(n, sizes) for n in (*whole, *sums))


# ------------------------------------------------------------------ bytes
def each(slabs: Slabs, sizes: Hints, limit: int) -> list[dict[sympy.Symbol, int]]:
    """The sizes of every slab, the last of which may have fewer rows."""
    rows, every = slabs.rows(sizes, limit), sizes[slabs.symbol]
    return [slabs.sizes(sizes, min(rows, every - start), start) for start in range(0, max(1, every), rows)]


def least_bytes(slabs: Slabs, sizes: Hints, limit: int) -> int:
    """The floor of slabs: every product reads its operands and writes its result in each; what comes between reads
    each product once, and writes each operand once, however many kernels it is; sums are read to be added to.

    Linear cross-entropy, T x H by V x H, in k slabs of tokens, b bytes an element, forward: T H + k V H + 2 T V;
    backward: 2 T H + 2 k V H for operands, (2 k - 1) V H for dw, T H for dx, 5 T V for z and dz. In k slabs of classes
    where the sums of rows are at hand: 2 V H + 2 k T H for operands, (2 k - 1) T H for dx, V H for dw, 5 T V.
    """
    dots = [v for v in slabs.group.graph.order() if v.prim == "dot"]
    around = _between_products(slabs.group.graph)
    moved = [t.nbytes for v in dots for t in (v.aval, *(a.aval for a in v.args))] + [v.aval.nbytes for v in around]
    every = each(slabs, sizes, limit)
    added = [estimate(v.aval.nbytes, sizes) for v in summed_products(slabs)]
    return sum(estimate(n, at) for at in every for n in moved) + (len(every) - 1) * sum(added)


def summed_products(slabs: Slabs) -> list[Value]:
    """The results of products that slabs add to."""
    pairs = zip(slabs.group.graph.outputs, slabs.outputs, strict=True)
    return [v for v, end in pairs if v is not None and end.axis is None and is_plain_product(v)]


def _between_products(graph: Graph) -> list[Value]:
    """What crosses between products and the rest, and what the rest reads and returns."""
    others = [v for v in graph.order() if v.prim != "dot" and not is_view(v)]
    made = {v.id for v in others}
    read = {_below_views(a) for v in others for a in v.args}
    given = [v for v in read if v.id not in made and PRIMS[v.prim].family != "source"]
    wanted = {_below_views(a) for v in graph.order() if v.prim == "dot" for a in v.args}
    results = {_below_views(v) for v in graph.results}
    return [*given, *(v for v in others if v in wanted or v in results)]


# ------------------------------------------------------------------ memory
NOTHING: Mapping[Value, Value] = {}
Made = tuple[Sequence[Value], Sequence[Value]]
"""What is read in one go, and what it makes."""


def held_by_steps(graph: Graph) -> tuple[Size, ...]:
    """Bytes between the steps of a graph, its products by the library and kernels for the rest."""
    steps, over = steps_of_slab(graph)
    flow = Flow(graph, steps)
    pairs = [(steps[at].results[result], steps[at].reads[product]) for at, (result, product) in over.items()]
    return _held(graph, [(flow.sources(s.reads), s.results) for s in flow.work], dict(pairs))


def held_by_nodes(graph: Graph) -> tuple[Size, ...]:
    """The same where torch runs it operation by operation."""
    nodes = [v for v in graph.order() if not is_view(v)]
    return _held(graph, [([_below_views(a) for a in v.args], (v,)) for v in nodes])


def _held(graph: Graph, steps: Sequence[Made], over: Mapping[Value, Value] = NOTHING) -> tuple[Size, ...]:
    """For each step, the bytes of what others made and this or a later one reads, and of what it makes for them.

    over: by what is computed into the memory of something, that.
    """
    ends = {v.id for v in (*graph.inputs, *graph.results, *over)}
    last = {over.get(v, v).id: at for at, (reads, _) in enumerate(steps) for v in reads}
    between = [(v, at) for at, (_, made) in enumerate(steps) for v in made if v.id in last and v.id not in ends]
    held = [[v.aval.nbytes for v, made in between if made <= at <= last[v.id]] for at in range(len(steps))]
    return tuple(dict.fromkeys(sum(sizes) for sizes in held if sizes))


def _below_views(value: Value) -> Value:
    while is_view(value):
        (value,) = value.args
    return value
