"""Products of a batch that are added up where an index says, as one sum for each place: of those that it selects.

    dw[e] += x[b].T @ g[b] where e = index[b]
        ->  dw[e] = sum over b and k of where(index[b] == e, x[b, k], 0) * where(index[b] == e, g[b, k], 0)

A kernel walks those that are selected alone (`emit/products.py`): no program adds to what another does, in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ..ir import Graph, Value
from ..ir.graph import emit
from ..ir.passes.index_checks import checked
from ..ir.passes.products import selects_products
from ..ir.rewrite import number_of, rebuild


def with_selected_sums(graph: Graph) -> Graph:
    """The graph with such sums in the place of scatters."""
    scatters = [v for v in graph.order() if selects_products(v)]
    return rebuild(graph, {}, {v.id: partial(_selected, v) for v in scatters}) if scatters else graph


def _selected(scatter: Value, env: Mapping[int, Value]) -> Value:
    base, product, index = scatter.args
    (axis,) = scatter.params["axes"]
    x_axes, y_axes, (batch, *others) = (product.params[p] for p in ("x_axes", "y_axes", "out_axes"))
    place = 1 + max(*x_axes, *y_axes)
    chosen = _chosen(env[index.id], base, axis)
    pairs = zip(product.args, (x_axes, y_axes), strict=True)
    x, y = (_where(chosen, env[v.id], axes.index(batch)) for v, axes in pairs)
    others.insert(axis, place)
    total = emit("dot", x, y, x_axes=(place, *x_axes), y_axes=(place, *y_axes), out_axes=tuple(others))
    return total if number_of(base) == 0 else emit("add", env[base.id], total)


def _chosen(index: Value, base: Value, axis: int) -> Value:
    """[places, batch]: whether the index of one of the batch is that place."""
    shape = base.shape[axis], index.shape[0]
    index = checked(index, shape[0])
    places = emit("iota", size=shape[0], dtype=index.dtype)
    return emit("eq", *(emit("broadcast", v, shape=shape, axes=(d,)) for d, v in enumerate((places, index))))


def _where(chosen: Value, x: Value, batch: int) -> Value:
    """[places, *x.shape]: an operand where it is chosen, else zero."""
    shape = chosen.shape[0], *x.shape
    mask = emit("broadcast", chosen, shape=shape, axes=(0, 1 + batch))
    wide = emit("broadcast", x, shape=shape, axes=tuple(range(1, len(shape))))
    return emit("where", mask, wide, emit("full", value=0.0, shape=shape, dtype=x.dtype))

