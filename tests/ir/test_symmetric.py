"""Sums over the rows of what is made of x @ x.T, as sums over columns of what is turned."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fusegrad.ir import Graph, TensorType, Value, building, emit, show, verify
from fusegrad.ir.passes.streaming.spellings.symmetric import one_sided, without_transposes
from fusegrad.ir.passes.virtual import sides_of, summed_axes, sums_of, virtual_values


def weights(x: Value, m: Value, y: Value) -> Value:
    """exp(2 * x @ y.T - m[:, None]) of samples [2, 9, 3], but for the diagonal."""
    n = x.shape[1]
    twice = emit("mul", x, emit("full", value=2.0, shape=x.shape, dtype=x.dtype))
    s = emit("dot", twice, y, x_axes=(0, 1, 3), y_axes=(0, 2, 3), out_axes=(0, 1, 2))
    e = emit("exp", emit("sub", s, emit("broadcast", m, shape=s.shape, axes=(0, 1))))
    i, j = (emit("broadcast", emit("iota", size=n, dtype="i64"), shape=s.shape, axes=(a,)) for a in (1, 2))
    zero = emit("full", value=0.0, shape=s.shape, dtype=x.dtype)
    return emit("where", emit("le", i, j), zero, e)


def times(w: Value, x: Value) -> Value:
    return emit("dot", w, x, x_axes=(0, 1, 2), y_axes=(0, 2, 3), out_axes=(0, 1, 3))


def turned(w: Value) -> Value:
    return emit("permute", w, perm=(0, 2, 1))


SUMS: dict[str, Callable[[Value, Value], Value]] = {
    "both": lambda w, x: emit("add", times(w, x), times(turned(w), x)),
    "by labels": lambda w, x: emit(
        "add", times(w, x), emit("dot", x, w, x_axes=(0, 1, 3), y_axes=(0, 1, 2), out_axes=(0, 2, 3))
    ),
    "together": lambda w, x: times(emit("add", w, turned(w)), x),
    "rows and columns": lambda w, x: emit("add", emit("sum", w, axes=(1,)), emit("amax", w, axes=(2,))),
}


def made(sums: Callable[[Value, Value], Value], dtype: str = "f32", of_itself: bool = True) -> Graph:
    graph = Graph("g")
    x, y = (graph.input(TensorType((2, 9, 3), dtype), name) for name in "xy")
    m = graph.input(TensorType((2, 9), dtype), "m")
    with building(graph):
        return graph.returning([sums(weights(x, m, x if of_itself else y), x)])


def spelled(graph: Graph) -> Graph:
    for spelling in (without_transposes, one_sided):
        graph = verify(spelling(graph, virtual_values(graph, {})))
    return graph


def summed_sides(graph: Graph) -> set[bool]:
    """Whether its sums are over rows (False), columns, or both."""
    virtual = virtual_values(graph, {})
    sides = sides_of(graph.order(), virtual)
    sums = sums_of(graph.order(), virtual)
    axes = [(a.id, i) for v in sums for at, a in enumerate(v.args) if a.id in virtual for i in summed_axes(v, at)]
    return {sides[axis] for axis in axes if axis in sides}


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_over_columns(name: str, same) -> None:
    graph = made(SUMS[name])
    assert summed_sides(spelled(graph)) == {True}
    same(graph, spelled(graph), rtol=1e-5)


@pytest.mark.parametrize(("dtype", "products"), [("f32", 2), ("bf16", 3)])
def test_products_that_are_added_are_one_where_nothing_is_rounded_between(dtype: str, products: int) -> None:
    assert [v.prim for v in spelled(made(SUMS["both"], dtype)).order()].count("dot") == products


@pytest.mark.parametrize("name", ["both", "by labels", "rows and columns"])
def test_pairs_of_two_batches_stay(name: str) -> None:
    graph = made(SUMS[name], of_itself=False)
    assert show(spelled(graph)) == show(graph)


def test_factors_that_round_are_no_powers_of_two() -> None:
    graph = Graph("g")
    x = graph.input(TensorType((9, 3), "f32"), "x")
    with building(graph):
        scaled = emit("mul", x, emit("full", value=3.0, shape=x.shape, dtype="f32"))
        s = emit("exp", emit("dot", scaled, x, x_axes=(0, 2), y_axes=(1, 2), out_axes=(0, 1)))
        graph.returning([emit("sum", s, axes=(0,)), emit("sum", s, axes=(1,))])
    assert show(spelled(graph)) == show(graph)
