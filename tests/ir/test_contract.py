"""Contract: the products that become `dot`, those that stay, and that the numbers agree."""

from collections.abc import Callable

import pytest
import sympy

from fusegrad.ir import Graph, TensorType, Value, building, emit, show, verify
from fusegrad.ir.passes.contract import Contract
from fusegrad.ir.passes.cost import estimate
from fusegrad.ir.passes.simplify import Simplify

B, P, Q, H = sympy.symbols("B P Q H", integer=True, positive=True)
SIZES = {B: 3, P: 4, Q: 5, H: 2}


def spread(x: Value, shape: tuple[object, ...], *axes: int) -> Value:
    """x over the axes `axes` of a larger shape."""
    return emit("broadcast", x, shape=shape, axes=axes)


def product(x: Value, x_axes: tuple[int, ...], y: Value, y_axes: tuple[int, ...], shape: tuple[object, ...]) -> Value:
    return emit("mul", spread(x, shape, *x_axes), spread(y, shape, *y_axes))


def inputs(dtype: str, *shapes: tuple[object, ...]) -> tuple[Graph, list[Value]]:
    graph = Graph("g")
    return graph, [graph.input(TensorType(s, dtype), f"x{i}") for i, s in enumerate(shapes)]


def contracted(graph: Graph) -> Graph:
    return verify(Simplify()(verify(Contract()(verify(Simplify()(graph))))))


def prims(graph: Graph) -> list[str]:
    return [v.prim for v in graph.order()]


def largest(graph: Graph) -> int:
    return max(estimate(v.aval.numel) for v in graph)


def largest_rank(graph: Graph) -> int:
    return max(v.ndim for v in graph)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
def test_a_linear_layer_written_by_broadcasting(dtype: str, same) -> None:
    """(w.unsqueeze(0) * x.unsqueeze(1)).sum(-1), and both its gradients, one summed over the batch afterwards."""
    graph, (x, w, g) = inputs(dtype, (B, Q), (P, Q), (B, P))
    full = (B, P, Q)
    with building(graph):
        row, col = emit("reshape", w, shape=(1, P, Q)), emit("reshape", x, shape=(B, 1, Q))
        up = emit("reshape", g, shape=(B, P, 1))
        y = emit("sum", product(row, (0, 1, 2), col, (0, 1, 2), full), axes=(2,))
        x_bar = emit("sum", product(up, (0, 1, 2), row, (0, 1, 2), full), axes=(1,))
        unreduced = product(up, (0, 1, 2), col, (0, 1, 2), full)
        w_bar = emit("reshape", emit("sum", unreduced, axes=(0,)), shape=(P, Q))
    graph.returning([y, x_bar, w_bar])
    after = contracted(graph)
    assert prims(after) == ["dot", "dot", "dot"]
    assert largest_rank(after) == 2
    same(graph, after, rtol=1e-12, sizes=SIZES)


CONTRACTS: list[tuple[str, list[tuple[object, ...]], Callable[..., Value]]] = [
    ("batched", [(B, H, P), (B, P, Q)], lambda x, y: emit(
        "sum", product(x, (0, 1, 2), y, (0, 2, 3), (B, H, P, Q)), axes=(2,))),
    ("permuted", [(Q, B), (P, Q)], lambda x, y: emit(
        "sum", emit("permute", emit("mul", emit("permute", spread(x, (Q, B, P), 0, 1), perm=(1, 2, 0)),
                                    spread(y, (B, P, Q), 1, 2)), perm=(2, 0, 1)), axes=(0,))),
    ("two axes at once", [(B, P, H), (P, H, Q)], lambda x, y: emit(
        "sum", product(x, (0, 1, 2), y, (1, 2, 3), (B, P, H, Q)), axes=(1, 2))),
    ("a row factor", [(B, P), (P, Q), (B,)], lambda x, y, s: emit(
        "sum", emit("mul", product(x, (0, 1), y, (1, 2), (B, P, Q)), spread(s, (B, P, Q), 0)), axes=(1,))),
    ("a factor of the right operand", [(B, P), (P, Q), (Q,)], lambda x, y, s: emit(
        "sum", emit("mul", spread(s, (B, P, Q), 2), product(x, (0, 1), y, (1, 2), (B, P, Q))), axes=(1,))),
    ("keeping an axis of size 1", [(B, P), (P, Q)], lambda x, y: emit(
        "sum", product(x, (1, 2), y, (2, 3), (1, B, P, Q)), axes=(2,))),
    ("an early sum", [(B, P, H), (P, Q)], lambda x, y: emit(
        "sum", product(x, (0, 1, 2), y, (1, 3), (B, P, H, Q)), axes=(1, 2))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shapes", "build"), CONTRACTS, ids=[n for n, *_ in CONTRACTS])
def test_becomes_a_product_of_matrices(name: str, shapes: list, build: Callable[..., Value], same) -> None:
    graph, values = inputs("f32", *shapes)
    with building(graph):
        graph.returning([build(*values)])
    after = contracted(graph)
    assert prims(after).count("dot") == 1
    assert largest(after) < largest(Simplify()(graph))
    same(graph, after, rtol=1e-12, sizes=SIZES)


STAYS: list[tuple[str, list[tuple[object, ...]], Callable[..., Value]]] = [
    ("row products", [(B, Q), (B, Q)], lambda x, y: emit("sum", emit("mul", x, y), axes=(1,))),
    ("squares", [(B, Q)], lambda x: emit("sum", emit("mul", x, x), axes=(1,))),
    ("matrix times vector", [(B, Q), (Q,)], lambda x, w: emit("sum", emit("mul", x, spread(w, (B, Q), 1)), axes=(1,))),
    ("weight gradient", [(B, Q), (B, Q), (B,)], lambda g, x, r: emit(
        "sum", emit("mul", emit("mul", g, x), spread(r, (B, Q), 0)), axes=(0,))),
    ("an outer product that is wanted", [(B,), (Q,)], lambda x, y: product(x, (0,), y, (1,), (B, Q))),
    ("an axis that neither factor has", [(B,), (Q,)], lambda x, y: emit(
        "sum", product(x, (0,), y, (2,), (B, P, Q)), axes=(1,))),
    ("a sum of sums", [(B, P), (P, Q)], lambda x, y: emit(
        "sum", emit("add", spread(x, (B, P, Q), 0, 1), spread(y, (B, P, Q), 1, 2)), axes=(1,))),
    ("a maximum", [(B, P), (P, Q)], lambda x, y: emit("amax", product(x, (0, 1), y, (1, 2), (B, P, Q)), axes=(1,))),
    ("three outer factors", [(B, P), (P, Q), (Q, B)], lambda x, y, z: emit("sum", emit(
        "mul", product(x, (0, 1), y, (1, 2), (B, P, Q)),
        spread(emit("permute", z, perm=(1, 0)), (B, P, Q), 0, 2)), axes=(1,))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shapes", "build"), STAYS, ids=[n for n, *_ in STAYS])
def test_stays_a_fused_reduction(name: str, shapes: list, build: Callable[..., Value], same) -> None:
    graph, values = inputs("f32", *shapes)
    with building(graph):
        graph.returning([build(*values)])
    simple = Simplify()(graph)
    assert Contract()(simple) is simple
    same(graph, verify(Contract()(graph)), rtol=1e-6, sizes=SIZES)  # whatever was simplified before


MATRIX, VECTOR = {"x_axes": (0, 1), "y_axes": (1,), "out_axes": (0,)}, {"x_axes": (0, 1, 2), "y_axes": (0, 2)}


def with_vector(x: Value, w: Value) -> Value:
    return emit("dot", x, w, **MATRIX)


def in_a_batch(x: Value, w: Value) -> Value:
    return emit("dot", x, w, **VECTOR, out_axes=(0, 1))


SUMMED: list[tuple[str, list[tuple[object, ...]], Callable[..., list[Value]]]] = [
    ("made element by element", [(B, Q), (Q,)], lambda x, w: [with_vector(emit("exp", x), w)]),
    ("made, in another layout", [(Q, B), (Q,)], lambda x, w: [
        with_vector(emit("permute", emit("exp", x), perm=(1, 0)), w)]),
    ("read as well", [(B, Q), (Q,)], lambda x, w: [with_vector(x, w), emit("exp", x)]),
    ("an outer product", [(B, P), (B, Q), (B, Q)], lambda k, v, q: [
        in_a_batch(product(k, (0, 1), v, (0, 2), (B, P, Q)), q)]),
    ("of rows with the same rows", [(B, Q), (B, Q)], lambda x, y: [
        emit("dot", x, y, x_axes=(0, 1), y_axes=(0, 1), out_axes=(0,))]),
    ("of two vectors", [(Q,), (Q,)], lambda x, y: [emit("dot", x, y, x_axes=(0,), y_axes=(0,), out_axes=())]),
    ("twice by vectors", [(B, Q), (Q,), (B,)], lambda x, w, g: [
        with_vector(emit("permute", emit("exp", x), perm=(1, 0)), emit("mul", g, with_vector(emit("exp", x), w)))]),
]  # fmt: skip
CALLED: list[tuple[str, list[tuple[object, ...]], Callable[..., list[Value]]]] = [
    ("of an input", [(B, Q), (Q,)], lambda x, w: [with_vector(x, w)]),
    ("of an input that products alone read", [(B, Q), (Q,), (Q, P)], lambda x, w, v: [
        with_vector(x, w), emit("dot", x, v, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))]),
    ("of two matrices", [(B, Q), (Q, P)], lambda x, w: [
        emit("dot", emit("exp", x), w, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))]),
    ("in a row with another matrix", [(B, P, Q), (B, Q), (B, H, P)], lambda k, q, v: [
        in_a_batch(emit("exp", v), emit("exp", in_a_batch(emit("exp", k), q)))]),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize(("name", "shapes", "build"), SUMMED, ids=[n for n, *_ in SUMMED])
def test_a_matrix_that_a_kernel_has_is_summed_on_the_way(name: str, shapes: list, build, dtype: str, same) -> None:
    graph, values = inputs(dtype, *shapes)
    with building(graph):
        graph.returning(build(*values))
    after = contracted(graph)
    assert "dot" not in prims(after)
    same(graph, after, rtol=4e-2 if dtype == "bf16" else 1e-6, sizes=SIZES)


@pytest.mark.parametrize(("name", "shapes", "build"), CALLED, ids=[n for n, *_ in CALLED])
def test_other_products_stay_calls(name: str, shapes: list, build) -> None:
    graph, values = inputs("f32", *shapes)
    with building(graph):
        graph.returning(build(*values))
    assert prims(contracted(graph)).count("dot") == prims(graph).count("dot")


def test_a_product_that_is_needed_anyway_is_summed_on_the_way() -> None:
    graph, (x, y) = inputs("f32", (B, P), (P, Q))
    with building(graph):
        outer = product(x, (0, 1), y, (1, 2), (B, P, Q))
        graph.returning([outer, emit("sum", outer, axes=(1,))])
    assert "dot" not in prims(contracted(graph))


def test_one_use_of_the_product_keeps_all_its_sums() -> None:
    graph, (x, y) = inputs("f32", (B, P), (P, Q))
    with building(graph):
        outer = product(x, (0, 1), y, (1, 2), (B, P, Q))
        graph.returning([emit("sum", outer, axes=(1,)), emit("sum", outer, axes=(0,)), emit("amax", outer, axes=(1,))])
    assert "dot" not in prims(contracted(graph))


def test_several_sums_of_one_product(same) -> None:
    graph, (x, y) = inputs("f32", (B, P), (P, Q))
    with building(graph):
        outer = product(x, (0, 1), y, (1, 2), (B, P, Q))
        graph.returning([emit("sum", outer, axes=(1,)), emit("sum", outer, axes=(0,))])
    after = contracted(graph)
    assert "dot" in prims(after) and largest_rank(after) == 2
    same(graph, after, rtol=1e-12, sizes=SIZES)


def test_summing_both_lone_axes_leaves_an_outer_product(same) -> None:
    """sum over i of x[b] * y[o, i]: y is summed first, and nothing is left to contract."""
    graph, (x, y) = inputs("f32", (B,), (P, Q))
    with building(graph):
        graph.returning([emit("sum", product(x, (0,), y, (1, 2), (B, P, Q)), axes=(2,))])
    after = contracted(graph)
    assert largest_rank(after) == 2
    same(graph, after, rtol=1e-12, sizes=SIZES)


def test_casts_of_the_factors_and_of_the_product_are_seen_through() -> None:
    graph, (x, y) = inputs("bf16", (B, P), (P, Q))
    with building(graph):
        outer = emit("cast", product(x, (0, 1), y, (1, 2), (B, P, Q)), dtype="f32")
        graph.returning([emit("sum", outer, axes=(1,))])
    after = contracted(graph)
    assert "dot(%2, %3" in show(after) and after.outputs[0].dtype == "f32"
    assert largest_rank(after) == 2


def test_a_cast_factor_may_be_needed_otherwise(same) -> None:
    """Only what is as large as the product has to go: the small operands are there anyway."""
    graph, (x, y) = inputs("bf16", (B, P), (P, Q))
    with building(graph):
        wider = emit("cast", x, dtype="f32")
        outer = product(wider, (0, 1), emit("cast", y, dtype="f32"), (1, 2), (B, P, Q))
        graph.returning([emit("sum", outer, axes=(1,)), emit("exp", wider)])
    after = contracted(graph)
    assert "dot" in prims(after) and largest_rank(after) == 2
    same(graph, after, rtol=1e-6, sizes=SIZES)


def test_an_operand_with_an_axis_of_size_1(same) -> None:
    graph, (x, y) = inputs("f32", (B, 1, P), (2, Q, P))
    with building(graph):
        shape = (B, 2, Q, P)
        outer = emit("mul", emit("broadcast", x, shape=shape, axes=(0, 1, 3)), spread(y, shape, 1, 2, 3))
        graph.returning([emit("sum", outer, axes=(3,))])
    after = contracted(graph)
    assert prims(after).count("dot") == 1
    same(graph, after, rtol=1e-12, sizes=SIZES)


def pairs(batch: object, m: object, k: object, n: object) -> Graph:
    graph, (x, y) = inputs("f32", (batch, m, k), (batch, k, n))
    with building(graph):
        result = emit("dot", x, y, x_axes=(0, 1, 2), y_axes=(0, 2, 3), out_axes=(0, 1, 3))
    graph.returning([result])
    return graph


def test_products_of_small_matrices_are_written_out(same) -> None:
    graph = pairs(B, 3, 3, 2)
    after = contracted(graph)
    assert "dot" not in prims(after) and "sum" not in prims(after) and prims(after).count("mul") == 3
    same(graph, after, rtol=1e-6, sizes=SIZES)


@pytest.mark.parametrize("sides", [(3, 3, 2), (1, P, 1)])
def test_products_of_sizes_that_are_equal_by_a_guard_alone_stay(sides: tuple[object, ...]) -> None:
    m, k, n = sides
    graph, (x, y) = inputs("f32", (B * P, m, k), (H * Q, k, n))
    with building(graph):
        result = emit("dot", x, y, x_axes=(0, 1, 2), y_axes=(0, 2, 3), out_axes=(0, 1, 3))
    graph.returning([result])
    assert "dot" in prims(contracted(graph))


@pytest.mark.parametrize("shape", [(B, 3, 16, 3), (B, P, 3, 3), (B, 3, Q, 3)])
def test_products_of_larger_ones_stay(shape: tuple[object, ...]) -> None:
    assert "dot" in prims(contracted(pairs(*shape)))


def test_small_matrices_that_are_summed_by_hand_are_no_call(same) -> None:
    """(x[:, :, :, None] * y[:, None]).sum(2)"""
    graph, (x, y) = inputs("f32", (B, 3, 4), (B, 4, 2))
    with building(graph):
        result = emit("sum", product(x, (0, 1, 2), y, (0, 2, 3), (B, 3, 4, 2)), axes=(2,))
    graph.returning([result])
    after = contracted(graph)
    assert "dot" not in prims(after)
    same(graph, after, rtol=1e-6, sizes=SIZES)
