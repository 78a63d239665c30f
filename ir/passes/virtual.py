"""Values that are never to be in memory: products larger than what they are made of, and what is made of these.

    s = q [n, d] @ k [m, d].T      [n, m] is larger than both: virtual; or than q, and what it is summed along is m
    s = (q[:, None] - k).abs().sum(-1)    virtual as well, where sums over pairs are asked for (`streaming/pairs`)
    p = exp(s - max)               virtual
    p @ v                          it sums over a virtual value, and is none

A kernel makes such values tile by tile, and keeps what they are summed to; one that keeps rows walks the columns, and
the other way round: `directions`. Which values could be left out of memory is asked here; whether they are is decided
where steps are merged (`streams`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import networkx as nx

from ..graph import Graph, Value
from ..prims import PRIMS
from .cost import Hints, estimate
from .layout import segments
from .streaming.pairs import pair_sums, sides_of_pairs

FOLLOWS = ("elementwise", "layout")
"""Families whose result is virtual where an operand is."""
DEEPEST = 256
"""The most places that few rows are contracted along: a tile holds them whole."""
Axis = tuple[int, int]
"""The id of a virtual value, and the place of an axis of it."""


def virtual_values(graph: Graph, hints: Hints, pairs: bool = False) -> frozenset[int]:
    """Ids of the live values that are virtual at these sizes. pairs: sums over pairs count as products."""
    nodes = graph.order()
    products = [v for v in nodes if v.prim == "dot"]
    large, few = ({v.id for v in products if is_one(v, hints)} for is_one in (_outgrows, _has_few_rows))
    large |= {v.id for v in pair_sums(nodes, hints)} if pairs else set()
    while True:
        virtual = _virtual(nodes, large, few, hints)
        mixed = _mixed_products(nodes, virtual)
        if not mixed:
            return virtual
        large, few = large - mixed, few - mixed


def _virtual(nodes: Sequence[Value], large: set[int], few: set[int], hints: Hints) -> frozenset[int]:
    """Of products that are large, and of those that have few rows."""
    virtual = _made_of(nodes, _without_outgrown(nodes, large, few, hints) | few)
    if not few & virtual:
        return virtual
    few = _summed_along_columns(few, nodes, virtual, hints)
    return _made_of(nodes, _without_outgrown(nodes, large, few, hints) | few)


def large_values(graph: Graph, hints: Hints, limit: int) -> frozenset[int]:
    """Ids of the live values that are products of more bytes than that, or made of them; not all operands are as large.

    What kernels would make tile by tile is among them (`virtual_values`), and what only fills memory.
    """
    nodes = graph.order()
    large = (v for v in nodes if v.prim == "dot" and estimate(v.aval.nbytes, hints) > limit)
    return _made_of(nodes, {v.id for v in large if _outgrows(v, hints, min)})


def is_source(value: Value, virtual: Collection[int]) -> bool:
    """A virtual value that is made of no other: a product, or a sum over pairs."""
    return value.id in virtual and (value.prim == "dot" or PRIMS[value.prim].family == "reduce")


def _made_of(nodes: Sequence[Value], products: Collection[int]) -> frozenset[int]:
    """Those of some products that read nothing virtual, and what is made of them element by element."""
    virtual: set[int] = set()
    for value in nodes:
        inside = any(a.id in virtual for a in value.args)
        if inside if PRIMS[value.prim].family in FOLLOWS else not inside and value.id in products:
            virtual.add(value.id)
    return frozenset(virtual)


def _outgrows(dot: Value, hints: Hints, of: Callable[[Iterable[int]], int] = max) -> bool:
    """The product has more elements than either operand; of=min: than one of them."""
    return estimate(dot.aval.numel, hints) > of(estimate(a.aval.numel, hints) for a in dot.args)


# ------------------------------------------------------------------ products of products
def _without_outgrown(nodes: Sequence[Value], large: Collection[int], few: Collection[int], hints: Hints) -> set[int]:
    """Those of some large products that no larger one has to do with: of `q @ (c @ w).T` and a softmax the scores.

    A product of a virtual value is none itself, and where two virtual values meet in a product a tile would have three
    axes. The larger is left out of memory, then, and the smaller is in it.
    """
    left, sizes = set(large), {v.id: estimate(v.aval.numel, hints) for v in nodes if v.id in large}
    while True:
        above = _products_above(nodes, _made_of(nodes, left | {*few}))
        fed = {v.id: _fed_to_larger(v, above, sizes) for v in nodes if v.prim == "dot" or v.id in sizes}
        summed = _summed_products(nodes, _made_of(nodes, left.difference(*fed.values()) | {*few}))
        outgrown = [inner for outer, inner in fed.items() if outer in summed]
        outgrown += [_met_by_larger(v, above, sizes) for v in nodes if v.prim == "dot"]
        if not any(outgrown):
            return left
        left = left.difference(*outgrown)


def _products_above(nodes: Sequence[Value], virtual: Collection[int]) -> dict[int, frozenset[int]]:
    """For each value the virtual products that it is made of, element by element, or as a product of such."""
    found: dict[int, frozenset[int]] = {}
    for value in nodes:
        above = frozenset[int]().union(*(found[a.id] for a in value.args if a.id in virtual))
        found[value.id] = above | {value.id} if is_source(value, virtual) else above
    return found


def _summed_products(nodes: Sequence[Value], virtual: Collection[int]) -> frozenset[int]:
    above = _products_above(nodes, virtual)
    return frozenset[int]().union(*(above[a.id] for v in sums_of(nodes, virtual) for a in v.args if a.id in virtual))


def _fed_to_larger(outer: Value, above: dict[int, frozenset[int]], sizes: dict[int, int]) -> frozenset[int]:
    """The products that a larger one is made of, which would be virtual without them."""
    inner = above[outer.id] & sizes.keys()
    most = max((sizes[i] for i in inner), default=0)
    return inner if outer.id not in inner and sizes.get(outer.id, 0) > most else frozenset()


def _met_by_larger(value: Value, above: dict[int, frozenset[int]], sizes: dict[int, int]) -> frozenset[int]:
    """The smaller products on one side of a product that has virtual values on both."""
    sides = [above.get(a.id, frozenset()) & sizes.keys() for a in value.args]
    if not all(sides) or sides[0] & sides[1]:
        return frozenset()
    least, most = sorted(sides, key=lambda side: max(sizes[i] for i in side))
    return least if max(sizes[i] for i in least) < min(sizes[i] for i in most) else frozenset()


# ------------------------------------------------------------------ rows and columns in one axis
def _mixed_products(nodes: Sequence[Value], virtual: Collection[int]) -> frozenset[int]:
    """Those of which rows and columns become other rows and columns, as where scores are skewed: no tile has these.

    pad(s [n, m])  ->  [n, m + 1]  ->  [m + 1, n]
    """
    reshaped = [v for v in nodes if v.id in virtual and v.prim == "reshape" and any(_divided_anew(v))]
    if not reshaped:
        return frozenset()
    axes, above = _Axes(nodes, virtual), _products_above(nodes, virtual)
    mixed = [v for v in reshaped if any(len(axes.sides_of(v.args[0], run)) == 2 for run in _divided_anew(v))]
    return frozenset[int]().union(*(above[v.id] for v in mixed))


def _divided_anew(value: Value) -> Iterator[list[int]]:
    """The places of each two or more axes that a reshape makes two or more others of."""
    (operand,) = value.args
    runs = [(_wide(operand, a), _wide(value, b)) for a, b in segments(operand.shape, value.shape)]
    yield from (a for a, b in runs if len(a) > 1 and len(b) > 1)


# ------------------------------------------------------------------ few rows
def _has_few_rows(dot: Value, hints: Hints) -> bool:
    """It outgrows one operand alone: some queries against many keys. Each key is read once, and no score is stored."""
    made, (least, most) = (estimate(dot.aval.numel, hints), sorted(estimate(a.aval.numel, hints) for a in dot.args))
    labels = zip(("x_axes", "y_axes"), dot.args, strict=True)
    sizes = {a: n for axes, operand in labels for a, n in zip(dot.params[axes], operand.shape, strict=True)}
    depth = math.prod(estimate(n, hints) for a, n in sizes.items() if a not in dot.params["out_axes"])
    return least < made <= most and depth <= DEEPEST


def _summed_along_columns(
    few: Collection[int], nodes: Sequence[Value], virtual: Collection[int], hints: Hints
) -> set[int]:
    """Ids of those products of few rows whose many columns something sums."""
    axes = _Axes(nodes, virtual)
    summed = frozenset[Axis]().union(*(axes.summed(v) for v in sums_of(nodes, virtual)))
    found = (v for v in nodes if v.id in few and v.id in virtual)
    return {v.id for v in found if any(axes.names[v.id, at] in summed for at in _columns(v, hints))}


def _columns(dot: Value, hints: Hints) -> list[int]:
    """The places of the axes that the larger operand alone has."""
    x, y = (estimate(a.aval.numel, hints) for a in dot.args)
    mine, other = (set(dot.params[axes]) for axes in (("x_axes", "y_axes") if x > y else ("y_axes", "x_axes")))
    return [at for at, label in enumerate(dot.params["out_axes"]) if label in mine - other]


# ------------------------------------------------------------------ what ends virtual values
def sums_of(nodes: Sequence[Value], virtual: Collection[int]) -> list[Value]:
    """The products and reductions among some nodes that virtual values end in."""
    ending = [v for v in nodes if PRIMS[v.prim].family in ("reduce", "contract")]
    return [v for v in ending if any(a.id in virtual for a in v.args)]


def directions(nodes: Sequence[Value], virtual: Collection[int]) -> list[list[Value]]:
    """For each walk over virtual values that sums them, the nodes that its sums need, operands first.

    One for each direction, and one more before it for what another direction reads. What another walk sums to is at
    hand. A sum over rows and columns goes with either.
    """
    walks = _without_both(_by_direction(nodes, virtual))
    every = {v.id for ends in walks for v in ends}
    needed = [needed_for(nodes, ends, every - {v.id for v in ends}) for ends in walks]
    # what another direction reads has to be complete before it begins
    read = [{a.id for other in needed if other is not own for v in other for a in v.args} for own in needed]
    parts = [
        part
        for ends, others in zip(walks, read, strict=True)
        for part in ([v for v in ends if v.id in others], [v for v in ends if v.id not in others])
        if part
    ]
    return [needed_for(nodes, ends, every - {v.id for v in ends}) for ends in parts]


def _by_direction(nodes: Sequence[Value], virtual: Collection[int]) -> dict[frozenset[Axis], list[Value]]:
    axes = _Axes(nodes, virtual)
    ends: defaultdict[frozenset[Axis], list[Value]] = defaultdict(list)
    for value in sums_of(nodes, virtual):
        ends[axes.summed(value)].append(value)
    return ends


def _without_both(ends: dict[frozenset[Axis], list[Value]]) -> list[list[Value]]:
    """Sums over rows and columns are among those of one direction."""
    single = {d: list(values) for d, values in ends.items() if len(d) < 2}
    if not single:
        return list(ends.values())
    for both, values in ends.items():
        if both not in single:
            single[next((d for d in single if d <= both), next(iter(single)))] += values
    return list(single.values())


def sides_of(nodes: Sequence[Value], virtual: Collection[int]) -> dict[Axis, bool]:
    """The axes of virtual values that are rows or columns: True where a product has them from its right operand."""
    axes = _Axes(nodes, virtual)
    return {axis: axes.sides[name] for axis, name in axes.names.items() if name in axes.sides}


def needed_for(nodes: Sequence[Value], ends: Sequence[Value], at_hand: Collection[int] = ()) -> list[Value]:
    """Those of some nodes in order that ends are made of, and these; nothing that only what is at hand needs."""
    needed = {v.id for v in ends}
    for value in reversed(nodes):
        if value.id in needed:
            needed |= {a.id for a in value.args if a.id not in at_hand}
    return [v for v in nodes if v.id in needed]


class _Axes:
    """The axes of virtual values, those that are one known by one of them; the rows and columns of products."""

    def __init__(self, nodes: Sequence[Value], virtual: Collection[int]) -> None:
        self.virtual = virtual
        same = nx.Graph()
        for value in (v for v in nodes if v.id in virtual):
            same.add_nodes_from((value.id, i) for i in range(value.ndim))
            same.add_edges_from(
                ((a.id, i), (value.id, j)) for a in value.args if a.id in virtual for i, j in _kept(a, value)
            )
        self.names = {axis: min(found) for found in nx.connected_components(same) for axis in found}
        products = [v for v in nodes if is_source(v, virtual)]
        self.sides = {self.names[axis]: right for v in reversed(products) for axis, right in _sides(v)}

    def sides_of(self, value: Value, places: Iterable[int]) -> set[bool]:
        """Whether these axes of a value are columns, as far as they are rows or columns."""
        names = (self.names[value.id, at] for at in places)
        return {self.sides[name] for name in names if name in self.sides}

    def summed(self, value: Value) -> frozenset[Axis]:
        """The rows or columns that a sum walks."""
        operands = [(a, i) for at, a in enumerate(value.args) if a.id in self.virtual for i in summed_axes(value, at)]
        return frozenset(name for a, i in operands if (name := self.names[a.id, i]) in self.sides)


def _sides(dot: Value) -> Iterator[tuple[Axis, bool]]:
    """The axes of a product that one operand alone has, and whether it is the right one."""
    if dot.prim != "dot":
        yield from _sides_of_pairs(dot)
        return
    x, y = set(dot.params["x_axes"]), set(dot.params["y_axes"])
    places = enumerate(dot.params["out_axes"])
    yield from (((dot.id, at), label in y) for at, label in places if (label in x) != (label in y))


def _sides_of_pairs(value: Value) -> Iterator[tuple[Axis, bool]]:
    sides, summed = sides_of_pairs(value), value.params["axes"]
    assert sides is not None
    places = [a for a in range(value.args[0].ndim) if a not in summed]
    for right, axes in enumerate(sides):
        yield from (((value.id, places.index(a)), bool(right)) for a in axes)


def summed_axes(value: Value, operand: int) -> list[int]:
    """The axes of an operand that a sum or product has no more."""
    if value.prim == "dot":
        labels, kept = value.params[("x_axes", "y_axes")[operand]], value.params["out_axes"]
        return [i for i, label in enumerate(labels) if label not in kept]
    return list(value.params["axes"] if "axes" in value.params else (value.params["axis"],))


def _kept(operand: Value, value: Value) -> list[tuple[int, int]]:
    """Pairs of axes, of an operand and of what is made of it, that are one."""
    if value.prim == "permute":
        return [(axis, at) for at, axis in enumerate(value.params["perm"])]
    if value.prim == "broadcast":
        return list(enumerate(value.params["axes"]))
    if value.prim == "reshape":
        runs = [(_wide(operand, a), _wide(value, b)) for a, b in segments(operand.shape, value.shape)]
        return [(a[0], b[0]) for a, b in runs if len(a) == len(b) == 1]
    return [(i, i) for i in range(value.ndim)]


def _wide(value: Value, axes: Sequence[int]) -> list[int]:
    return [i for i in axes if value.shape[i] != 1]
