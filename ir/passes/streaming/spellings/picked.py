"""Elements that an index picks, one from each row of a virtual value: sums of what is zero elsewhere.

    s[i, j] for i = 0 .. n - 1, j = t[i]      ->   sum over j of where(j == t[i], s, 0)

A diagonal is picked by t[i] = i. A kernel that walks the columns passes there anyway.
"""

from __future__ import annotations

from functools import partial

from ....graph import Graph, Value
from ....infer import same_shape
from ....rewrite import make, rebuild


def without_picks(graph: Graph, virtual: frozenset[int]) -> Graph:
    """The graph with such sums in the place of gathers of virtual values, where these keep the rows' order."""
    gathers = [v for v in graph.order() if v.prim == "gather" and v.args[0].id in virtual]
    axes = {v.id: (v, pair) for v in gathers if (pair := _row_and_column(v)) is not None}
    return rebuild(graph, {}, {i: partial(_summed, v, *pair) for i, (v, pair) in axes.items()}) if axes else graph


def _row_and_column(gather: Value) -> tuple[int, int] | None:
    """The axis whose places come one after the other, and the one that is picked from; None where it is another gather.

    Places among the gather's index operands.
    """
    if len(gather.params["axes"]) != 2:
        return None
    x, *index = gather.args
    for row in (0, 1):
        size = x.shape[gather.params["axes"][row]]
        if index[row].prim == "iota" and same_shape(index[row].shape, (size,)):
            return row, 1 - row
    return None


def _summed(gather: Value, row: int, column: int, env: dict[int, Value]) -> Value:
    x, place = env[gather.args[0].id], env[gather.args[1 + column].id]
    across, along = gather.params["axes"][row], gather.params["axes"][column]
    columns = make("iota", size=x.shape[along], dtype=place.dtype)
    pair = ((columns, (along,)), (place, (across,)))
    here = make("eq", *(make("broadcast", v, shape=x.shape, axes=axes) for v, axes in pair))
    zero = make("full", value=0 if not x.aval.is_float else 0.0, shape=x.shape, dtype=x.dtype)
    picked = make("sum", make("where", here, x, zero), axes=(along,))
    first = across - (along < across)
    order = (first, *(a for a in range(picked.ndim) if a != first))
    return make("permute", picked, perm=order) if order != tuple(range(picked.ndim)) else picked
