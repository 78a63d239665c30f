"""The share that masks leave of a product: sampled where places decide, everything where data does."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import sympy

from fusegrad.ir import Graph, TensorType, Value, building, emit
from fusegrad.ir.passes.streaming.alive import alive_share
from fusegrad.ir.passes.virtual import virtual_values

N, M = sympy.symbols("n m", integer=True, positive=True)
SIZES = {N: 4096, M: 8192}


def share(
    mask: Callable[[Value, Value], Value], value: float = -math.inf, swapped: bool = False, rows: object = N
) -> float:
    """Of q k^T [300, rows, M] where mask(i, j) is true, or (swapped) where it is not."""
    graph, shape = Graph("g"), (rows, M)
    q, k = (graph.input(TensorType((300, n, 64), "f32"), name) for n, name in ((rows, "q"), (M, "k")))
    length = graph.input(TensorType(shape, "i64"), "length")
    with building(graph):
        s = emit("dot", q, k, x_axes=(0, 1, 3), y_axes=(0, 2, 3), out_axes=(0, 1, 2))
        places = [emit("iota", size=n, dtype="i64") for n in shape]
        i, j = (emit("broadcast", p, shape=shape, axes=(axis,)) for axis, p in enumerate(places))
        masked = mask(i, length if mask is by_data else j)
        condition = emit("broadcast", masked, shape=s.shape, axes=(1, 2))
        dead = emit("full", value=value, shape=s.shape, dtype="f32")
        graph.returning([emit("where", condition, dead, s) if swapped else emit("where", condition, s, dead)])
    return alive_share(graph.order(), virtual_values(graph, SIZES), SIZES)


def number(value: object, like: Value) -> Value:
    return emit("full", value=value, shape=like.shape, dtype="i64")


def causal(i: Value, j: Value) -> Value:
    return emit("ge", i, j)


def window(i: Value, j: Value) -> Value:
    return emit("and", causal(i, j), emit("lt", emit("sub", i, j), number(512, i)))


def from_the_end(i: Value, j: Value) -> Value:
    return emit("ge", emit("add", i, number(M - N, i)), j)


def by_data(i: Value, length: Value) -> Value:
    return emit("ge", i, length)


@pytest.mark.parametrize(("mask", "expected"), [(causal, 0.25), (window, 0.06), (from_the_end, 0.75), (by_data, 1.0)])
def test_shares_of_4096_by_8192(mask: Callable[[Value, Value], Value], expected: float) -> None:
    """The last masks by data, of which nothing is known."""
    assert share(mask) == pytest.approx(expected, abs=0.02)


def test_the_other_side_may_be_the_masked_one() -> None:
    assert share(causal, swapped=True) == pytest.approx(0.75, abs=0.02)


def test_what_is_no_mask_of_scores_leaves_all() -> None:
    assert share(causal, value=1.0) == share(causal, value=math.inf) == 1.0


def test_sizes_in_numbers_are_not_sampled_beyond_a_limit() -> None:
    assert share(causal, rows=1024) == pytest.approx(0.06, abs=0.02)
    assert share(causal, rows=1 << 17) == 1.0
