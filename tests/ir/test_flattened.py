"""What is made of a flattened product has the product's axes; other flattened values stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import sympy

from fusegrad.ir import Graph, TensorType, Value, building, emit, show
from fusegrad.ir.passes.simplify import Simplify

N, M = sympy.symbols("N M", integer=True, positive=True)
SIZES = {N: 5, M: 7}


def exponentials(s: Value, top: Value) -> Value:
    flat = emit("reshape", s, shape=(N * M,))
    return emit("exp", emit("sub", flat, emit("broadcast", top, shape=flat.shape, axes=())))


def graph_of(make: Callable[[Value, Value, Value], list[Value]]) -> Graph:
    graph = Graph("g")
    x, y, top = (graph.input(TensorType(s, "f32"), n) for s, n in (((N, 3), "x"), ((M, 3), "y"), ((), "top")))
    with building(graph):
        return graph.returning(make(x, y, top))


def scores(x: Value, y: Value) -> Value:
    return emit("dot", x, y, x_axes=(0, 2), y_axes=(1, 2), out_axes=(0, 1))


def sum_and_gradient(x: Value, y: Value, top: Value) -> list[Value]:
    e = exponentials(scores(x, y), top)
    back = emit("reshape", emit("mul", e, e), shape=(N, M))
    return [emit("sum", e, axes=(0,)), emit("dot", back, y, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))]


def test_sums_over_both_axes(run: Callable) -> None:
    graph = graph_of(sum_and_gradient)
    simple = Simplify()(graph)
    assert "reshape" not in show(simple)
    assert [v.params["axes"] for v in simple.order() if v.prim == "sum"] == [(0, 1)]
    arrays = [np.random.default_rng(0).normal(size=s).astype("f4") for s in ((5, 3), (7, 3), ())]
    for before, after in zip(run(graph, arrays, SIZES), run(simple, arrays, SIZES), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-6)


def test_what_is_no_product_stays_flat() -> None:
    def outer(x: Value, y: Value, top: Value) -> list[Value]:
        rows = (emit("broadcast", emit("sum", v, axes=(1,)), shape=(N, M), axes=(a,)) for a, v in enumerate((x, y)))
        return [exponentials(emit("add", *rows), top)]

    assert [v.shape for v in Simplify()(graph_of(outer)).order() if v.prim == "exp"] == [(N * M,)]


def test_beside_other_flat_values_it_stays_flat() -> None:
    def weighted(x: Value, y: Value, top: Value) -> list[Value]:
        places = emit("cast", emit("iota", size=N * M, dtype="i64"), dtype="f32")
        return [emit("mul", emit("reshape", scores(x, y), shape=(N * M,)), places)]

    assert "reshape" in show(Simplify()(graph_of(weighted)))
