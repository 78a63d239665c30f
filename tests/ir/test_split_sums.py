"""Sums over rows and columns, taken over columns first."""

from __future__ import annotations

import pytest

from fusegrad.ir import Graph, TensorType, building, emit, show, verify
from fusegrad.ir.passes.streaming.spellings.split_sums import split_sums
from fusegrad.ir.passes.virtual import virtual_values


def summed(prim: str, axes: tuple[int, ...], dtype: str = "f32", turned: bool = False) -> Graph:
    """A reduction of exp(q @ k.T) [3, 9, 7], or of its transpose [3, 7, 9]."""
    graph = Graph("g")
    q, k = graph.input(TensorType((3, 9, 2), dtype), "q"), graph.input(TensorType((3, 7, 2), dtype), "k")
    with building(graph):
        e = emit("exp", emit("dot", q, k, x_axes=(0, 1, 3), y_axes=(0, 2, 3), out_axes=(0, 1, 2)))
        e = emit("permute", e, perm=(0, 2, 1)) if turned else e
        graph.returning([emit(prim, e, axes=axes)])
    return graph


def split(graph: Graph) -> list[tuple[int, ...]]:
    after = verify(split_sums(graph, virtual_values(graph, {})))
    return [v.params["axes"] for v in after.order() if "axes" in v.params]


@pytest.mark.parametrize("prim", ["sum", "amax", "amin", "prod"])
@pytest.mark.parametrize(
    ("axes", "turned", "steps"),
    [((1, 2), False, [(2,), (1,)]), ((0, 1, 2), False, [(2,), (0, 1)]), ((0, 1, 2), True, [(1,), (0, 1)])],
)
def test_columns_first(prim: str, axes: tuple[int, ...], turned: bool, steps: list[tuple[int, ...]], same) -> None:
    graph = summed(prim, axes, turned=turned)
    assert split(graph) == steps
    same(graph, split_sums(graph, virtual_values(graph, {})), rtol=1e-12)


@pytest.mark.parametrize("axes", [(1,), (2,), (0, 1), (0, 2), (0,)])
def test_a_sum_in_one_direction_stays(axes: tuple[int, ...]) -> None:
    graph = summed("sum", axes)
    assert show(split_sums(graph, virtual_values(graph, {}))) == show(graph)


def test_row_sums_of_low_floats_are_not_rounded() -> None:
    graph = summed("sum", (1, 2), "bf16")
    after = verify(split_sums(graph, virtual_values(graph, {})))
    assert [v.dtype for v in after.order()][-4:] == ["f32", "f32", "f32", "bf16"]
