"""Products over plain axes: what becomes of layout around them, and that the numbers agree."""

from __future__ import annotations

import pytest
import sympy

from fusegrad.ir import Graph, TensorType, Value, building, emit, show, verify
from fusegrad.ir.passes.streaming.spellings.dot_axes import plain_dots

B, H, K, P, Q, D = sympy.symbols("B H K P Q D", integer=True, positive=True)
SIZES = {B: 2, H: 6, K: 3, P: 4, Q: 5, D: 2}
BATCHED = {"x_axes": (0, 1, 2), "y_axes": (0, 2, 3), "out_axes": (0, 1, 3)}


def inputs(*shapes: tuple[object, ...]) -> tuple[Graph, list[Value]]:
    graph = Graph("g")
    return graph, [graph.input(TensorType(s, "f32"), f"x{i}") for i, s in enumerate(shapes)]


def plain(graph: Graph, same) -> tuple[list[str], list[Value]]:
    """The primitives of the graph afterwards, and its products, whose numbers are as before."""
    after = verify(plain_dots(graph))
    same(graph, after, rtol=1e-12, sizes=SIZES)
    return [v.prim for v in after.order()], [v for v in after.order() if v.prim == "dot"]


def test_merged_batches_are_taken_apart_and_transposes_are_labels(same) -> None:
    graph, (q, k) = inputs((B, H, P, D), (B, H, Q, D))
    with building(graph):
        x = emit("reshape", q, shape=(B * H, P, D))
        y = emit("reshape", emit("permute", k, perm=(0, 1, 3, 2)), shape=(B * H, D, Q))
        s = emit("dot", x, y, **BATCHED)
        graph.returning([emit("reshape", s, shape=(B, H, P, Q))])
    prims, (dot,) = plain(graph, same)
    assert prims == ["dot"] and dot.shape == (B, H, P, Q)


def test_an_operand_that_is_repeated_for_several_heads_is_read_once(same) -> None:
    """H heads on K: the quotient of two symbols is the length of an axis."""
    graph, (q, k, g) = inputs((B, H, P, D), (B, K, Q, D), (B, H, P, Q))
    group = H / K
    with building(graph):
        turned = emit("permute", emit("reshape", k, shape=(B, K, 1, Q, D)), perm=(0, 1, 2, 4, 3))
        spread = emit("broadcast", turned, shape=(B, K, group, D, Q), axes=(0, 1, 2, 3, 4))
        x, y = emit("reshape", q, shape=(B * H, P, D)), emit("reshape", spread, shape=(B * H, D, Q))
        s = emit("reshape", emit("dot", x, y, **BATCHED), shape=(B, K, group, P, Q))
        back = emit("permute", emit("reshape", g, shape=(B, K, group, P, Q)), perm=(0, 1, 2, 4, 3))
        dk = emit("dot", emit("reshape", back, shape=(B * H, Q, P)), x, **BATCHED)
        dk = emit("sum", emit("reshape", dk, shape=(B, K, group, Q, D)), axes=(2,))
        graph.returning([s, dk])
    prims, (score, gradient) = plain(graph, same)
    assert "broadcast" not in prims and "permute" not in prims and "sum" not in prims
    assert score.args[1].shape == (B, K, Q, D) and gradient.shape == (B, K, Q, D)


def test_axes_of_size_one_are_none(same) -> None:
    graph, (x, y) = inputs((1, P, 1, D), (1, D, Q))
    with building(graph):
        graph.returning([emit("dot", x, y, x_axes=(0, 1, 4, 2), y_axes=(0, 2, 3), out_axes=(0, 1, 4, 3))])
    prims, (dot,) = plain(graph, same)
    assert dot.shape == (P, Q) and set(prims) == {"reshape", "dot"}


def test_what_is_merged_along_a_sum_is_taken_apart_as_well(same) -> None:
    graph, (x, y) = inputs((P, B, D), (Q, B * D))
    with building(graph):
        flat = emit("reshape", x, shape=(P, B * D))
        graph.returning([emit("dot", flat, y, x_axes=(0, 2), y_axes=(1, 2), out_axes=(0, 1))])
    _, (dot,) = plain(graph, same)
    assert dot.args[0].shape == (P, B, D) and dot.args[1].shape == (Q, B, D)


@pytest.mark.parametrize("axes", [(1,), (2,), (1, 2)])
def test_a_sum_over_what_one_operand_has_stays(axes: tuple[int, ...], same) -> None:
    graph, (x, y) = inputs((B, P, D), (B, D, Q))
    with building(graph):
        graph.returning([emit("sum", emit("dot", x, y, **BATCHED), axes=axes)])
    assert plain(graph, same)[0] == ["dot", "sum"]


def test_an_operand_repeated_along_an_axis_of_its_own_keeps_it(same) -> None:
    graph, (x, y) = inputs((B, P, D), (B, D))
    with building(graph):
        wide = emit("broadcast", y, shape=(B, D, Q), axes=(0, 1))
        graph.returning([emit("dot", x, wide, **BATCHED)])
    assert plain(graph, same)[0] == ["broadcast", "dot"]


def test_nothing_to_do(same) -> None:
    graph, (x, y) = inputs((B, P, D), (B, D, Q))
    with building(graph):
        graph.returning([emit("dot", x, y, **BATCHED)])
    assert show(plain_dots(graph)) == show(graph)
