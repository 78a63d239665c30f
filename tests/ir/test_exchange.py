"""Sums that are taken in the other order: where the bracket is there, and that the numbers agree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import sympy

from fusegrad.ir import Graph, TensorType, Value, building, emit, verify
from fusegrad.ir.passes.programs.exchange import Bracket, exchanged

B, N, M, D = sympy.symbols("B N M D", integer=True, positive=True)
SIZES = {B: 2, N: 5, M: 7, D: 3}
FULL = (B, N, M)
Body = Callable[[Value, Value, Value], Value]


def scores(x: Value, y: Value) -> Value:
    return emit("dot", x, y, x_axes=(0, 1, 3), y_axes=(0, 2, 3), out_axes=(0, 1, 2))


def result(a: Value, y: Value) -> Value:
    return emit("dot", a, y, x_axes=(0, 1, 2), y_axes=(0, 2, 3), out_axes=(0, 1, 3))


def rows(value: Value) -> Value:
    return emit("broadcast", value, shape=FULL, axes=(0, 1))


def program(body: Body, made: Body, dtype: str = "f32") -> tuple[Graph, Bracket]:
    """body(a, x y, row) of a [B, N, M], x [B, N, D], y [B, M, D] and a row [B, N]; the bracket: made(a, y, row)."""
    graph = Graph("g")
    types = {"a": FULL, "x": (B, N, D), "y": (B, M, D), "row": (B, N), "out": (B, N, D)}
    a, x, y, row, out = (graph.input(TensorType(shape, dtype), name) for name, shape in types.items())
    with building(graph):
        graph.returning([body(a, scores(x, y), row)])
        bracket = Bracket(out, made(a, y, row))
    return graph, bracket


def summed(value: Value) -> Value:
    return emit("sum", value, axes=(2,))


def run_both(before: Graph, after: Graph, bracket: Bracket, run: Callable) -> None:
    """The same numbers, if the bracket is what it is said to be."""
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(0.5, 1, [int(n.xreplace(SIZES)) for n in v.shape]) for v in before.inputs[:4]]
    asked = before.copy()
    asked.returning([Value(asked, bracket.made.id)])
    (out,) = run(asked, [*arrays, np.zeros((2, 5, 3))], SIZES)
    (a,), (b,) = run(before, [*arrays, out], SIZES), run(after, [*arrays, out], SIZES)
    np.testing.assert_allclose(b, a, rtol=1e-12)


def assert_exchanged(body: Body, made: Body, run: Callable, dtype: str = "f32") -> Graph:
    graph, bracket = program(body, made, dtype)
    after, used = exchanged(graph, [bracket])
    assert used == [bracket]
    assert "dot" not in [v.prim for v in verify(after).order()], "neither product is formed"
    run_both(graph, after, bracket, run)
    return after


def test_the_textbook(run) -> None:
    after = assert_exchanged(lambda a, s, _: summed(emit("mul", a, s)), lambda a, y, _: result(a, y), run)
    assert [v.prim for v in after.order()] == ["mul", "sum"]


def test_factors_on_either_side_are_those_of_the_bracket(run) -> None:
    """Dropout: p * (dp * keep) and (p * keep) @ v."""
    keep = lambda a: emit("exp", a)  # noqa: E731
    body = lambda a, s, _: summed(emit("mul", a, emit("mul", s, keep(a))))  # noqa: E731
    assert_exchanged(body, lambda a, y, _: result(emit("mul", keep(a), a), y), run)


def test_what_is_fixed_along_the_sum_stands_before_it(run) -> None:
    """Rows and numbers, divided by or multiplied with, that the bracket has or has not."""

    def body(a: Value, s: Value, row: Value) -> Value:
        two = emit("full", value=2.0, shape=FULL, dtype="f32")
        return summed(emit("mul", emit("div", a, rows(row)), emit("mul", s, two)))

    assert_exchanged(body, lambda a, y, _: result(a, y), run)
    assert_exchanged(body, lambda a, y, row: result(emit("mul", a, rows(row)), y), run)


def test_sums_of_low_floats_are_added_in_float32(run) -> None:
    after = assert_exchanged(lambda a, s, _: summed(emit("mul", a, s)), lambda a, y, _: result(a, y), run, "bf16")
    assert [v.dtype for v in after.order() if v.prim == "sum"] == ["f32"] and after.outputs[0].dtype == "bf16"


def taken_off(a: Value, s: Value, _: Value) -> Value:
    """s - sum(a * s), by the negative of the sum's rows"""
    return emit("add", s, emit("neg", rows(summed(emit("mul", a, s)))))


def test_what_is_taken_off_is_not_rounded_before(run) -> None:
    graph, bracket = program(taken_off, lambda a, y, _: result(a, y), "bf16")
    after, _ = exchanged(graph, [bracket])
    dtypes = {v.prim: v.dtype for v in verify(after).order()}
    assert {dtypes[prim] for prim in ("sum", "neg", "add")} == {"f32"} and after.outputs[0].dtype == "bf16"
    run_both(graph, after, bracket, run)


def merged(value: Value) -> Value:
    return emit("reshape", value, shape=(value.shape[0] * value.shape[1], *value.shape[2:]))


def test_a_bracket_in_another_shape(run) -> None:
    graph, bracket = program(lambda a, s, _: summed(emit("mul", a, s)), lambda a, y, _: merged(result(a, y)))
    other = graph.input(TensorType((B * N, D), "f32"), "merged")
    after, used = exchanged(graph, [Bracket(other, bracket.made)])
    assert len(used) == 1 and "dot" not in [v.prim for v in verify(after).order()]


OTHER: dict[str, tuple[Body, Body]] = {
    "another A": (lambda a, s, _: summed(emit("mul", emit("exp", a), s)), lambda a, y, _: result(a, y)),
    "A twice": (lambda a, s, _: summed(emit("mul", a, emit("mul", a, s))), lambda a, y, _: result(a, y)),
    "no product": (lambda a, s, _: summed(emit("add", a, s)), lambda a, y, _: result(a, y)),
    "the other axis": (lambda a, s, _: emit("sum", emit("mul", a, s), axes=(1,)), lambda a, y, _: result(a, y)),
    "both axes": (lambda a, s, _: emit("sum", emit("mul", a, s), axes=(1, 2)), lambda a, y, _: result(a, y)),
    "another y": (lambda a, s, _: summed(emit("mul", a, s)), lambda a, y, _: result(a, emit("exp", y))),
    "squared": (lambda a, s, _: summed(emit("mul", emit("mul", a, s), s)), lambda a, y, _: result(a, y)),
    "divided by the product": (lambda a, s, _: summed(emit("div", a, s)), lambda a, y, _: result(a, y)),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_sums_stay(name: str) -> None:
    graph, bracket = program(*OTHER[name])
    assert exchanged(graph, [bracket]) == (graph, [])


def test_y_has_to_be_shared_axis_by_axis() -> None:
    """A square y that one product reads transposed."""
    graph = Graph("g")
    types = {"a": (N, M), "x": (N, M), "y": (M, M), "out": (N, M)}
    a, x, y, out = (graph.input(TensorType(shape, "f32"), name) for name, shape in types.items())
    with building(graph):
        s = emit("dot", x, y, x_axes=(0, 2), y_axes=(1, 2), out_axes=(0, 1))
        graph.returning([emit("sum", emit("mul", a, s), axes=(1,))])
        right = emit("dot", a, y, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))
        turned = emit("dot", a, y, x_axes=(0, 1), y_axes=(2, 1), out_axes=(0, 2))
    assert len(exchanged(graph, [Bracket(out, right)])[1]) == 1
    assert exchanged(graph, [Bracket(out, turned)]) == (graph, [])
