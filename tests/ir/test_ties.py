"""What is equal to a row's extreme, as a place where one element is, and as what is near where several are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fusegrad.ir import Graph, TensorType, Value, building, emit, show, verify
from fusegrad.ir.passes.streaming.spellings.ties import tie_of, without_ties
from fusegrad.ir.passes.virtual import virtual_values

N, M, D = 7, 9, 3


def scores(x: Value, y: Value) -> Value:
    return emit("dot", x, y, x_axes=(0, 2), y_axes=(1, 2), out_axes=(0, 1))


def rows(row: Value, s: Value, axis: int) -> Value:
    return emit("broadcast", row, shape=s.shape, axes=(1 - axis,))


def shared(x: Value, y: Value, g: Value, prim: str = "amax", axis: int = 1) -> Value:
    """(g / count)[:, None] * (s == extreme), as amax derives it, times the other matrix."""
    s = scores(x, y)
    hit = emit("eq", rows(emit(prim, s, axes=(axis,)), s, axis), s)
    count = emit("cast", emit("sum", emit("cast", hit, dtype="i64"), axes=(axis,)), dtype="f32")
    part = emit("mul", rows(emit("div", g, count), s, axis), emit("cast", hit, dtype="f32"))
    return emit("dot", part, y, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))


def made(prim: str = "amax", axis: int = 1) -> Graph:
    graph = Graph("g")
    shapes = {"x": (N, D), "y": (M, D), "g": ((N, M)[1 - axis],)}
    x, y, g = (graph.input(TensorType(shape, "f32"), name) for name, shape in shapes.items())
    with building(graph):
        return graph.returning([shared(x, y, g, prim, axis)])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("prim", ["amax", "amin"])
def test_numbers(prim: str, axis: int, run: Callable) -> None:
    """Of rows that have one extreme, and of those that have it twice."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(-3, 4, (N, D)).astype("f4"), rng.integers(-3, 4, (M, D)).astype("f4")
    y[4], x[5] = y[2], x[1]
    g = rng.uniform(0.5, 1, (N, M)[1 - axis]).astype("f4")
    graph = made(prim, axis)
    spelled = verify(without_ties(graph, virtual_values(graph, {})))
    (before,), (after,) = run(graph, [x, y, g], {}), run(spelled, [x, y, g], {})
    np.testing.assert_array_equal(after, before)


def test_only_what_counts_compares_with_the_extreme() -> None:
    graph = made()
    spelled = without_ties(graph, virtual_values(graph, {}))
    ties = [v for v in spelled.order() if tie_of(v) is not None]
    assert [[u.prim for user in tie.users for u in user.users] for tie in ties] == [["sum"]]


def test_other_comparisons_stay() -> None:
    """Of another row's extreme, of what is in memory, and of both axes."""
    graph = Graph("g")
    x, y, s = (graph.input(TensorType(shape, "f32"), n) for shape, n in (((N, D), "x"), ((N, D), "y"), ((N, N), "s")))
    with building(graph):
        p = scores(x, y)
        turned = emit("eq", emit("broadcast", emit("amax", p, axes=(1,)), shape=p.shape, axes=(1,)), p)
        all_of_it = emit("eq", emit("broadcast", emit("amax", p, axes=(0, 1)), shape=p.shape, axes=()), p)
        other = emit("eq", rows(emit("amax", s, axes=(1,)), s, 1), s)
        graph.returning([emit("sum", emit("cast", v, dtype="f32"), axes=(1,)) for v in (turned, all_of_it, other)])
    assert show(without_ties(graph, virtual_values(graph, {}))) == show(graph)
