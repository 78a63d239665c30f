"""What is asserted of every element of an index is a check where the index is read."""

from __future__ import annotations

import pytest
import sympy

from fusegrad.ir import Graph, TensorType, Value, building, emit, verify
from fusegrad.ir.passes.identities.assertions import AssertedIndices

N = sympy.Symbol("N", integer=True, positive=True)
SPEC = (("$0", "one_hot: Class values must be in range."), ())


def assert_all(index: Value, comparison: str, number: int) -> None:
    """assert all(index <comparison> number), as torch spells it."""
    holds = emit(comparison, index, emit("full", value=number, shape=index.shape, dtype=index.dtype))
    least = emit("amin", emit("cast", holds, dtype="i32"), axes=tuple(range(index.ndim)))
    truth = emit("gt", least, emit("full", value=0, shape=(), dtype="i32"))
    emit("aten_effect", truth, op="aten._assert_async.msg", spec=SPEC, avals=())


def asserted(*claims: tuple[str, int], dtype: str = "i64") -> tuple[Graph, list[str]]:
    """i + i and i, where these are asserted of i: the graph after the pass, and its primitives."""
    graph = Graph("g")
    index = graph.input(TensorType((N, 4), dtype), "i")
    with building(graph):
        for claim in claims:
            assert_all(index, *claim)
        graph.returning([emit("add", index, index), index])
    after = verify(AssertedIndices()(graph))
    return after, [v.prim for v in after.order()]


def test_an_index_is_checked_where_it_is_read() -> None:
    graph, prims = asserted(("ge", 0), ("lt", 7))
    assert prims == ["full", "check_index", "add"]
    assert graph.outputs[1] == graph.inputs[0]  # an argument that is returned is that argument
    assert graph.outputs[0] is not None and graph.outputs[0].arg(0).arg(1).params["value"] == 7


def test_each_size_is_checked_once() -> None:
    _, prims = asserted(("ge", 0), ("lt", 7), ("ge", 0), ("lt", 5))
    assert prims.count("check_index") == 2 and "aten_effect" not in prims


@pytest.mark.parametrize(
    ("claims", "dtype"),
    [([("lt", 7)], "i64"), ([("ge", 0)], "i64"), ([("ge", 1), ("lt", 7)], "i64"), ([("ge", 0), ("lt", 7)], "f32")],
)
def test_what_is_no_range_of_an_index_stays_asserted(claims: list[tuple[str, int]], dtype: str) -> None:
    _, prims = asserted(*claims, dtype=dtype)
    assert prims.count("aten_effect") == len(claims) and "check_index" not in prims
