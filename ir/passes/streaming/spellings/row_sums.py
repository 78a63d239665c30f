"""Sums of virtual low floats stay float32 where the tile reads them: between two kernels nothing rounds a row.

    p: bf16 = softmax(s);  total: bf16 = sum(p * dp);  p * (dp - total)
    becomes    p: f32;  total: f32 = sum(p * dp);  cast(p, bf16) * cast(cast(dp, f32) - total, bf16)

Eager adds products that it has rounded. A kernel adds them as they are before it knows what to divide them by; a
difference that nearly cancels has to take off what was added, not what it was rounded to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TypeAlias

from ....graph import Graph, Value
from ....prims import PRIMS
from ....rewrite import make, rebuild
from ....types import LOW_FLOATS, Size
from ...virtual import sums_of
from .split_sums import exact

Builders: TypeAlias = dict[int, Callable[[dict[int, Value]], Value]]
PLAIN = ("elementwise", "layout")
"""Families of what may stand between two sums."""
CARRIES = ("mul", "neg")
"""Primitives that a sum goes through on its way to what takes it off."""


def wide_row_sums(graph: Graph, virtual: frozenset[int]) -> Graph:
    """The graph with such sums in float32, and what is made of one sum and goes into another; results as they were."""
    nodes = graph.order()
    sums = [v for v in sums_of(nodes, virtual) if v.prim != "dot"]
    low = {v.id for v in sums if v.prim == "sum" and v.dtype in LOW_FLOATS}
    carried, readers = _taken_off(nodes, low)
    readers &= virtual
    if not readers:
        return graph
    between = _between(nodes, {v.id for v in sums}, low)
    wide: dict[int, Value] = {}
    kept = {v.id: partial(_kept, v, wide) for v in nodes if v.id in (carried | between)}
    return rebuild(graph, {}, kept | {i: partial(_apart, Value(graph, i), wide) for i in readers - between})


def wide_readers(
    graph: Graph, wide: dict[int, Value], low: Collection[int], shapes: Collection[tuple[Size, ...]]
) -> Builders:
    """What builds the readers of such sums, by id: of some sums, which are in `wide` by then, and of tiles alone."""
    nodes = graph.order()
    carried, readers = _taken_off(nodes, low)
    readers = {i for i in readers if Value(graph, i).shape in shapes}
    if not readers:
        return {}
    built: Builders = {v.id: partial(_kept, v, wide) for v in nodes if v.id in carried and v.id not in low}
    built.update((i, partial(_apart, Value(graph, i), wide)) for i in readers)
    return built


def _taken_off(nodes: Sequence[Value], low: Collection[int]) -> tuple[set[int], set[int]]:
    """(what some sums are moved into, and they themselves; what adds these, or takes them off)"""
    carried = _made_of(low, (v for v in nodes if PRIMS[v.prim].family == "layout" or v.prim in CARRIES))
    return carried, {v.id for v in nodes if v.prim in ("add", "sub") and _reads(v, carried)}


def _reads(value: Value, known: Collection[int]) -> bool:
    return any(a.id in known for a in value.args)


def _made_of(known: Collection[int], nodes: Iterable[Value]) -> set[int]:
    """Some values, and the nodes that read what is made of them."""
    found = set(known)
    for value in nodes:
        found |= {value.id} if _reads(value, found) else set()
    return found


def _between(nodes: Sequence[Value], sums: Collection[int], low: Collection[int]) -> set[int]:
    """The low floats that are made of a sum and go into one of low floats: of a tile, or of its rows alone."""
    after = _made_of(sums, nodes)
    needed = {a.id for v in nodes if v.id in low for a in v.args}
    for value in reversed(nodes):
        if value.id in needed and value.id in after:
            needed |= {a.id for a in value.args}
    plain = (v for v in nodes if PRIMS[v.prim].family in PLAIN and v.dtype in LOW_FLOATS)
    return {v.id for v in plain if v.id in needed and v.id in after}


def _kept(value: Value, wide: dict[int, Value], env: dict[int, Value]) -> Value:
    """The value, and in `wide` the same as float32."""
    args = [_exact(a, wide, env) for a in value.args]
    made = args[0] if value.prim == "cast" else make(value.prim, *args, **value.params)
    wide[value.id] = make("cast", made, dtype="f32") if made.dtype != "f32" else made
    return make("cast", wide[value.id], dtype=value.dtype)


def _apart(value: Value, wide: dict[int, Value], env: dict[int, Value]) -> Value:
    """What reads such a sum, rounded once."""
    return make("cast", make(value.prim, *(_exact(a, wide, env) for a in value.args)), dtype=value.dtype)


def _exact(value: Value, wide: dict[int, Value], env: dict[int, Value]) -> Value:
    return wide[value.id] if value.id in wide else exact(env[value.id])
