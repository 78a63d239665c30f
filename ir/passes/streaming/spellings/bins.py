"""Tiles that an index adds into a small table, as a sum of what is in each bin: the gradient of a bias by distance.

    table.index_add(0, bucket.flatten(), ds.sum(0).flatten(1).T)      bucket [n, m], ds [b, h, n, m], table [bins, h]
        ->   sum over n and m of where(bucket == bin, ds.sum(0), 0)

Where scores are made tile by tile, so is that: what a tile has for each bin is summed before it leaves the kernel
(`codegen/schedule/streams/bins.py`), and nothing of the size of the scores is in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from ....graph import Graph, Value
from ....rewrite import make, number_of, rebuild
from ....types import FLOATS
from ...cost import Hints, estimate
from ...index_checks import checked
from ...layout import layout, segments
from ...virtual import sides_of

MOST = 1024
"""Bins of a table, at most: a program holds a sum for each."""
FEW = 64
"""How many times as many numbers are added as there are bins for them."""
THROUGH = ("cast", "neg")
"""What may stand between a tile and the table."""
Runs = list[tuple[int, ...]]


def binned(nodes: Sequence[Value], virtual: frozenset[int], hints: Hints) -> list[Value]:
    """The scatters among some nodes that add up tiles of virtual values, or of sums of these, in a few bins."""
    found = [v for v in nodes if v.prim == "scatter" and _is_small(v, hints)]
    sides = sides_of(nodes, virtual) if found else {}
    return [v for v in found if {True, False} <= {sides.get(a) for a in _indexed(v, virtual)}]


def with_bins(graph: Graph, virtual: frozenset[int], hints: Hints) -> Graph:
    """The graph with sums in the place of such scatters."""
    found = {v.id: partial(_summed, v) for v in binned(graph.order(), virtual, hints)}
    return rebuild(graph, layout, found) if found else graph


def _is_small(scatter: Value, hints: Hints) -> bool:
    base, source, *_ = scatter.args
    (axis, *others) = scatter.params["axes"]
    if others or scatter.params["mode"] != "add" or base.dtype not in FLOATS:
        return False
    added, kept = (estimate(v.aval.numel, hints) for v in (source, base))
    return estimate(base.shape[axis], hints) <= MOST and FEW * kept <= added


def _indexed(scatter: Value, virtual: Collection[int]) -> Iterable[tuple[int, int]]:
    """The axes of a virtual value along which the scatter has an index for each element; none where there is none."""
    _, source, index = scatter.args
    value, runs = _with_finer_axes(source)
    axes = [a for run in runs[: index.ndim] for a in run]
    while value.id not in virtual:
        if value.prim in THROUGH:
            (value,) = value.args
        elif value.prim == "permute":
            axes = [value.params["perm"][a] for a in axes]
            (value,) = value.args
        elif value.prim == "sum":
            kept = [a for a in range(value.args[0].ndim) if a not in value.params["axes"]]
            axes = [kept[a] for a in axes]
            (value,) = value.args
        else:
            return ()
    return ((value.id, a) for a in axes)


def _with_finer_axes(value: Value) -> tuple[Value, Runs]:
    """What a value is where no view has merged and moved its axes; and for each of its axes, those that it is there."""
    if value.prim == "permute":
        inner, runs = _with_finer_axes(value.args[0])
        return inner, [runs[a] for a in value.params["perm"]]
    if value.prim == "reshape":
        (source,) = value.args
        merged = segments(source.shape, value.shape)
        if all(len(own) == 1 for _, own in merged):
            inner, runs = _with_finer_axes(source)
            parts = {own[0]: tuple(a for axis in several for a in runs[axis]) for several, own in merged}
            return inner, [parts[a] for a in range(value.ndim)]
    return value, _each(value)


def _each(value: Value) -> Runs:
    return [(a,) for a in range(value.ndim)]


def _summed(scatter: Value, env: dict[int, Value]) -> Value:
    """sum(where(index == bin, source, 0)), and the bins where the table has them."""
    base, source, index = (env[a.id] for a in scatter.args)
    (axis,) = scatter.params["axes"]
    value, runs = _with_finer_axes(source)
    along = [a for run in runs[: index.ndim] for a in run]
    fine = make("reshape", checked(index, base.shape[axis]), shape=tuple(value.shape[a] for a in along))
    shape = (base.shape[axis], *value.shape)
    bins = make("iota", size=base.shape[axis], dtype=fine.dtype)
    pair = make("broadcast", bins, shape=shape, axes=(0,)), _along(fine, shape, along)
    wide = make("broadcast", value, shape=shape, axes=tuple(range(1, len(shape))))
    zero = make("full", value=0.0, shape=shape, dtype=value.dtype)
    total = make("sum", make("where", make("eq", *pair), wide, zero), axes=tuple(sorted(1 + a for a in along)))
    return _in_place(total, base, axis, runs[index.ndim :], along)


def _along(index: Value, shape: Sequence[int], along: Sequence[int]) -> Value:
    """The index at each place: its axes are some of the tile's, in an order of their own."""
    order = sorted(range(len(along)), key=along.__getitem__)
    moved = index if order == list(range(len(along))) else make("permute", index, perm=tuple(order))
    return make("broadcast", moved, shape=tuple(shape), axes=tuple(1 + along[at] for at in order))


def _in_place(total: Value, base: Value, axis: int, others: Runs, along: Sequence[int]) -> Value:
    """[bins, the tile's other axes]  ->  the table, added to what it held."""
    left = [a for a in range(total.ndim - 1 + len(along)) if a not in along]
    perm = (0, *(1 + left.index(a) for run in others for a in run))
    total = make("permute", total, perm=perm) if perm != tuple(range(total.ndim)) else total
    sizes = [n for a, n in enumerate(base.shape) if a != axis]
    total = make("reshape", total, shape=(base.shape[axis], *sizes))
    back = (*range(1, axis + 1), 0, *range(axis + 1, base.ndim))
    total = make("permute", total, perm=back) if axis else total
    return total if number_of(base) == 0 else make("add", base, total)
