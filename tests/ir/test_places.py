"""Comparisons that the range of an index answers, counted numbers, sums of which a place leaves one term."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy

from fusegrad.ir import Graph, TensorType, Value, building, emit, verify
from fusegrad.ir.passes.simplify import Simplify

M = sympy.Symbol("M", integer=True, positive=True)
Build = Callable[[Value], Value]


def simplified(build: Build, dtype: str = "f32") -> tuple[Graph, Graph]:
    """A graph over an input of M elements, and what becomes of it."""
    graph = Graph("g")
    x = graph.input(TensorType((M,), dtype), "x")
    with building(graph):
        graph.returning([build(x)])
    return graph, verify(Simplify()(graph))


def prims(graph: Graph) -> list[str]:
    return [v.prim for v in graph.order() if v.prim != "input"]


def places() -> Value:
    return emit("iota", size=M, dtype="i64")


def number(value: Any, shape: tuple[Any, ...] = (M,), dtype: str = "i64") -> Value:
    return emit("full", value=value, shape=shape, dtype=dtype)


ANSWERED = {
    "ne": (-100, True), "eq": (-1, False), "gt": (-1, True), "ge": (0, True), "lt": (0, False), "le": (-1, False),
}  # fmt: skip


@pytest.mark.parametrize("comparison", ANSWERED)
def test_a_place_is_no_number_below_zero(comparison: str) -> None:
    beside, answer = ANSWERED[comparison]
    _, done = simplified(lambda x: emit(comparison, places(), number(beside)))
    (only,) = done.outputs
    assert only is not None and only.prim == "full" and only.params["value"] is answer


@pytest.mark.parametrize(("comparison", "beside"), [("ne", 0), ("ne", 3), ("gt", 0), ("le", 0), ("lt", 5)])
def test_what_the_range_does_not_answer(comparison: str, beside: int) -> None:
    _, done = simplified(lambda x: emit(comparison, places(), number(beside)))
    assert comparison in prims(done)


def test_indices_that_are_data_may_be_anything() -> None:
    _, done = simplified(lambda x: emit("ne", x, number(-100)), "i64")
    assert "ne" in prims(done)


def test_numbers_are_counted() -> None:
    flags = lambda x: emit("cast", emit("ne", places(), number(-100)), dtype="i64")  # noqa: E731
    _, done = simplified(lambda x: emit("sum", flags(x), axes=(0,)))
    (only,) = done.outputs
    assert only is not None and only.prim == "full" and only.params["value"] == M


def one_of(index: Value, x: Value, nothing: float = 0.0) -> Value:
    """sum over j of where(j == index[i], x[i], nothing)"""
    j, i, wide = (
        emit("broadcast", v, shape=(M, M), axes=(a,)) for v, a in ((places(), 1), (index, 0), (x, 0))
    )
    chosen = emit("where", emit("eq", j, i), wide, number(nothing, (M, M), x.dtype))
    return emit("sum", emit("cast", chosen, dtype="f32"), axes=(1,))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_sum_of_one_term_is_that_term(dtype: str, same: Any) -> None:
    graph, done = simplified(lambda x: one_of(places(), x), dtype)
    assert "sum" not in prims(done) and "add" in prims(done)
    same(graph, done)  # bit for bit: -0.0 and NaN are among the inputs


def test_sums_that_may_have_no_term_or_more() -> None:
    data = lambda x: emit("cast", x, dtype="i64")  # noqa: E731
    assert "sum" in prims(simplified(lambda x: one_of(data(x), x))[1])
    assert "sum" in prims(simplified(lambda x: one_of(emit("add", places(), number(1)), x))[1])
    assert "sum" in prims(simplified(lambda x: one_of(places(), x, 1.0))[1])
    assert "sum" in prims(simplified(lambda x: one_of(places(), x, -0.0))[1])
