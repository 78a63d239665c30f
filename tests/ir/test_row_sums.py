"""Row sums of low floats that a tile takes off again: float32, and so is what they are sums of."""

from __future__ import annotations

from typing import Any

import pytest

from fusegrad.ir import Graph, TensorType, Value, building, emit, show, verify
from fusegrad.ir.passes.streaming.spellings.row_sums import wide_row_sums
from fusegrad.ir.passes.virtual import virtual_values


def gradient_of_softmax(dtype: str, takes_off: str = "sub", factor: bool = False) -> Graph:
    """ds = p * (dp - sum(p * dp)) of squares of probabilities, p = softmax(q @ k.T), as backward is written."""
    graph = Graph("g")
    q, k = graph.input(TensorType((9, 2), dtype), "q"), graph.input(TensorType((7, 2), dtype), "k")
    with building(graph):
        s = emit("dot", q, k, x_axes=(0, 2), y_axes=(1, 2), out_axes=(0, 1))
        wide = emit("cast", s, dtype="f32") if dtype != "f32" else s
        e = emit("exp", wide)
        p = emit("div", e, spread(emit("sum", e, axes=(1,)), e))
        p = emit("cast", p, dtype=dtype) if dtype != "f32" else p
        dp = emit("add", p, p)
        total = emit("sum", emit("mul", p, dp), axes=(1,))
        row = spread(emit("neg", total) if factor else total, s)
        ds = emit("mul", p, emit(takes_off, dp, row))
        graph.returning([emit("dot", ds, k, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2)), total])
    return graph


def spread(row: Value, like: Value) -> Value:
    return emit("broadcast", row, shape=like.shape, axes=(0,))


def widened(graph: Graph) -> Graph:
    return verify(wide_row_sums(graph, virtual_values(graph, {})))


def dtypes(graph: Graph, prim: str) -> list[str]:
    return [v.dtype for v in graph.order() if v.prim == prim]


@pytest.mark.parametrize("more", [{}, {"takes_off": "add", "factor": True}])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_sum_that_is_taken_off_is_float32(dtype: str, more: dict[str, Any], same) -> None:
    graph = gradient_of_softmax(dtype, **more)
    after = widened(graph)
    assert dtypes(graph, "sum") == ["f32", dtype] and dtypes(after, "sum") == ["f32", "f32"]
    assert set(dtypes(after, more.get("takes_off", "sub"))) == {"f32"}
    assert [o.dtype for o in after.outputs if o is not None] == [dtype, dtype]
    same(graph, after, rtol=0.05)


def test_so_is_what_stands_between_of_rows_alone(same) -> None:
    """p = e / (sum(e) + sum(e)), all of it of low floats."""
    graph = Graph("g")
    q, k = graph.input(TensorType((9, 2), "bf16"), "q"), graph.input(TensorType((7, 2), "bf16"), "k")
    with building(graph):
        e = emit("exp", emit("dot", q, k, x_axes=(0, 2), y_axes=(1, 2), out_axes=(0, 1)))
        row = emit("sum", e, axes=(1,))
        p = emit("div", e, spread(emit("add", row, row), e))
        ds = emit("sub", p, spread(emit("sum", emit("mul", p, p), axes=(1,)), e))
        graph.returning([emit("dot", ds, k, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))])
    after = widened(graph)
    assert {*dtypes(after, "add"), *dtypes(after, "div"), *dtypes(after, "sum")} == {"f32"}
    same(graph, after, rtol=0.05)


@pytest.mark.parametrize(("dtype", "takes_off"), [("f32", "sub"), ("bf16", "max")])
def test_others_stay(dtype: str, takes_off: str) -> None:
    graph = gradient_of_softmax(dtype, takes_off)
    assert show(widened(graph)) == show(graph)
