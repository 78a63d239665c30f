"""A sum over rows and columns of a virtual value as one of row sums: a kernel walks the columns and keeps rows."""

from __future__ import annotations

from functools import partial

from ....graph import Graph, Value
from ....rewrite import make, rebuild
from ....types import LOW_FLOATS
from ...virtual import sides_of, sums_of

ORDERLESS = ("sum", "prod", "amax", "amin")
"""Reductions that may be taken over one axis, then over others."""


def split_sums(graph: Graph, virtual: frozenset[int]) -> Graph:
    """The graph with sums over columns first. What columns are, the right operand of the first product says."""
    nodes = graph.order()
    sides = sides_of(nodes, virtual)
    found = {v.id: _columns(v, sides) for v in sums_of(nodes, virtual) if v.prim in ORDERLESS}
    split = {v.id: partial(_split, v, found[v.id]) for v in nodes if 0 < len(found.get(v.id, ())) < _axes(v, sides)}
    return rebuild(graph, {}, split) if split else graph


def _columns(value: Value, sides: dict[tuple[int, int], bool]) -> tuple[int, ...]:
    return tuple(a for a in value.params["axes"] if sides.get((value.args[0].id, a)) is True)


def _axes(value: Value, sides: dict[tuple[int, int], bool]) -> int:
    """How many of the axes that it sums are rows or columns."""
    return sum((value.args[0].id, a) in sides for a in value.params["axes"])


def _split(value: Value, columns: tuple[int, ...], env: dict[int, Value]) -> Value:
    (x,) = (env[a.id] for a in value.args)
    rows = make(value.prim, exact(x), axes=columns)
    others = [a for a in value.params["axes"] if a not in columns]
    total = make(value.prim, rows, axes=tuple(a - sum(c < a for c in columns) for a in others))
    return make("cast", total, dtype=value.dtype) if total.dtype != value.dtype else total


def exact(value: Value) -> Value:
    """A value, where it is a low float as float32: what is made of it is not rounded to that."""
    return make("cast", value, dtype="f32") if value.dtype in LOW_FLOATS else value
