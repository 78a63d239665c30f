"""Regions in slabs as graphs: which dim is walked, what runs before, within and after, and how many rows fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import sympy

from fusegrad.ir import Graph, TensorType, Value, building, emit
from fusegrad.ir.evaluate import evaluate
from fusegrad.ir.passes.fuse import Extern, Fuse, Group, Step
from fusegrad.ir.passes.products import Machine
from fusegrad.ir.passes.streaming.in_place import steps_of_slab
from fusegrad.ir.passes.streaming.slabs import Slabs, Walked, held_by_nodes, held_by_steps
from fusegrad.ir.passes.streaming.streams import StreamDecision, Streams

MACHINE = Machine(3.0e12, {"f16": 900e12, "bf16": 900e12, "f32": 60e12})
T, H, V = sympy.symbols("t h v", integer=True, positive=True)
SIZES = {T: 512, H: 64, V: 2048}
LOGITS = 512 * 2048 * 4
Body = Callable[..., Sequence[Value] | Value]
LAYER = ((T, H), (V, H))


def decided(body: Body, *shapes: tuple[Any, ...], limit: int = LOGITS // 4, dtype: str = "f32") -> StreamDecision:
    return divided(body, *shapes, limit=limit, dtype=dtype)[1]


def divided(
    body: Body, *shapes: tuple[Any, ...], limit: int = LOGITS // 4, dtype: str = "f32", sizes: Any = SIZES
) -> tuple[list[Step], StreamDecision]:
    graph = Graph("body")
    with building(graph):
        made = body(*(graph.input(TensorType(s, dtype), f"x{i}") for i, s in enumerate(shapes)))
    graph.returning(list(made) if isinstance(made, Sequence) else [made])
    steps, (decision,) = Streams(MACHINE, sizes, kernels=False, limit=limit)(graph, Fuse()(graph))
    return steps, decision


def walked(decision: StreamDecision) -> Walked:
    assert decision.walked is not None and decision.slabs is not None
    return decision.walked


def logits(x: Value, w: Value) -> Value:
    return emit("dot", x, w, x_axes=(0, 2), y_axes=(1, 2), out_axes=(0, 1))


def number(value: Any, like: Value | None = None) -> Value:
    return emit("full", value=value, shape=() if like is None else like.shape, dtype="f32")


def spread(row: Value, like: Value, axis: int) -> Value:
    return emit("broadcast", row, shape=like.shape, axes=(axis,))


def log_sums(x: Value, w: Value) -> Value:
    z = logits(x, w)
    top = emit("amax", z, axes=(1,))
    return emit("add", top, emit("log", emit("sum", emit("exp", emit("sub", z, spread(top, z, 0))), axes=(1,))))


def mean(rows: Value) -> Value:
    return emit("div", emit("sum", rows, axes=(0,)), number(rows.shape[0]))


# ------------------------------------------------------------------ which dim
def test_rows_are_walked_where_each_is_normalised() -> None:
    found = walked(decided(log_sums, *LAYER))
    assert found.slabs.symbol == T and not found.before and not found.after
    assert [e.axis for e in found.slabs.inputs] == [0, None] and [e.axis for e in found.slabs.outputs] == [0]


def test_the_dim_that_moves_less_is_walked() -> None:
    """A sum over rows, of products that no row is normalised of: few rows are read once a slab, not many columns."""
    found = walked(decided(lambda x, w: emit("sum", emit("exp", logits(x, w)), axes=(0,)), *LAYER))
    assert found.slabs.symbol == V and [e.axis for e in found.slabs.inputs] == [None, 0]


def test_what_is_made_of_sums_comes_after() -> None:
    found = walked(decided(lambda x, w: mean(log_sums(x, w)), *LAYER))
    (after,) = found.after
    assert [v.prim for v in after.graph.order()][-1] == "div"
    assert [e.axis for e in found.slabs.outputs] == [None]


def test_what_needs_all_rows_comes_before() -> None:
    def body(x: Value, w: Value, weight: Value) -> Value:
        share = emit("div", weight, total(weight))
        return emit("sum", emit("mul", log_sums(x, w), share), axes=(0,))

    def total(weight: Value) -> Value:
        return emit("broadcast", emit("sum", weight, axes=(0,)), shape=weight.shape, axes=())

    found = walked(decided(body, *LAYER, (T,)))
    (before,) = found.before
    assert [v.prim for v in before.graph.order()] == ["sum"] and found.slabs.symbol == T


def test_the_number_of_all_rows_stays_what_it_is() -> None:
    def body(x: Value, w: Value) -> Value:
        z = emit("exp", logits(x, w))
        return emit("amax", emit("div", z, number(T, z)), axes=(1,))

    slabs = walked(decided(body, *LAYER)).slabs
    assert slabs.count is not None and slabs.sizes(SIZES, 16)[slabs.count] == SIZES[T]
    assert slabs.sizes(SIZES, 16)[T] == 16 and slabs.first is None


def test_places_are_counted_from_the_first_row_of_all() -> None:
    def body(x: Value, w: Value) -> Value:
        z = logits(x, w)
        place = emit("broadcast", emit("iota", size=T, dtype="f32"), shape=z.shape, axes=(0,))
        return emit("amax", emit("mul", z, place), axes=(1,))

    slabs = walked(decided(body, *LAYER)).slabs
    assert slabs.first is not None and slabs.sizes(SIZES, 16, 48)[slabs.first] == 48


# ------------------------------------------------------------------ what is refused
def refusal(body: Body, *shapes: tuple[Any, ...], **more: Any) -> str:
    decision = decided(body, *shapes, **more)
    assert decision.slabs is None and decision.unwalked and decision.unwalked in str(decision)
    return decision.unwalked


def test_rows_and_columns_that_are_normalised_both() -> None:
    def body(x: Value, w: Value) -> Value:
        z = logits(x, w)
        rows, columns = emit("amax", z, axes=(1,)), emit("amax", z, axes=(0,))
        both = emit("sub", emit("sub", z, spread(rows, z, 0)), spread(columns, z, 1))
        return emit("sum", emit("exp", both), axes=(0, 1))

    why = refusal(body, *LAYER)
    assert why.startswith("none of its dims can be walked: ") and "reduces it by amax" in why


def test_a_result_of_all_rows() -> None:
    why = refusal(lambda x, w: [emit("exp", logits(x, w)), log_sums(x, w)], *LAYER)
    assert why == "`exp` is returned or saved"


def test_sizes_that_are_constants() -> None:
    why = refusal(log_sums, (512, 64), (2048, 64))
    assert why == "none of its dims can be walked: their sizes are constants"


def test_rows_that_are_needed_again_when_all_are_there() -> None:
    def body(x: Value, w: Value) -> Value:
        z = emit("exp", logits(x, w))
        total = emit("broadcast", emit("sum", z, axes=(0, 1)), shape=z.shape, axes=())
        return emit("amax", emit("div", z, total), axes=(1,))

    assert "needs the sums over all of it" in refusal(body, *LAYER)


def test_what_fits_stays() -> None:
    decision = decided(log_sums, *LAYER, limit=LOGITS)
    assert decision.slabs is None and decision.walked is not None and not decision.unwalked


# ------------------------------------------------------------------ rows
@pytest.mark.parametrize("limit", [1, 5_000, 10_000, 131_072, 500_000, LOGITS - 1, LOGITS])
def test_rows_of_a_slab_are_bounded_and_alike(limit: int) -> None:
    slabs = walked(decided(log_sums, *LAYER)).slabs
    rows, count = slabs.rows(SIZES, limit), slabs.slabs(SIZES, limit)
    assert slabs.held_at(SIZES, rows) <= max(limit, slabs.held_at(SIZES, 1))
    assert rows * (count - 1) < SIZES[T] <= rows * count
    assert rows % 16 == 0 or rows < 16
    assert SIZES[T] - rows * (count - 1) > rows // 2 or rows <= 16  # the last one is no small rest


def test_no_rows_are_one_slab() -> None:
    slabs = walked(decided(log_sums, *LAYER)).slabs
    assert (slabs.rows({**SIZES, T: 0}, 100), slabs.slabs({**SIZES, T: 0}, 100)) == (1, 1)


# ------------------------------------------------------------------ the steps of a slab
def gradients(x: Value, w: Value, sums: Value) -> list[Value]:
    z = logits(x, w)
    dz = emit("exp", emit("sub", z, spread(sums, z, 0)))
    dx = emit("dot", dz, w, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))
    return [dx, emit("dot", dz, x, x_axes=(0, 1), y_axes=(0, 2), out_axes=(1, 2))]


def test_what_is_made_of_a_product_takes_its_memory() -> None:
    slabs = walked(decided(gradients, *LAYER, (T,))).slabs
    steps, over = steps_of_slab(slabs.group.graph)
    ((at, pair),) = over.items()
    group = steps[at]
    assert isinstance(group, Group) and group.inputs[pair[1]].prim == "dot"
    assert slabs.held_at(SIZES) == LOGITS
    assert max(sum(map(int, [size.subs(SIZES)])) for size in held_by_nodes(slabs.group.graph)) == 2 * LOGITS


def test_sums_of_rows_are_a_kernel_of_their_own_before_that() -> None:
    def body(x: Value, w: Value) -> list[Value]:
        return gradients(x, w, log_sums(x, w))

    slabs = walked(decided(body, *LAYER)).slabs
    steps, over = steps_of_slab(slabs.group.graph)
    groups = [s for s in steps if isinstance(s, Group)]
    assert len(groups) == 2 and len(over) == 1 and sum(isinstance(s, Extern) for s in steps) == 3
    assert {v.prim for v in groups[1].graph.order()}.isdisjoint({"amax", "sum"})
    assert slabs.held_at(SIZES) <= LOGITS + 8 * 512 * 4


def test_a_product_that_is_read_later_is_kept() -> None:
    def body(x: Value, w: Value) -> list[Value]:
        z = logits(x, w)
        first = emit("dot", emit("exp", z), w, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))
        return [first, emit("dot", z, w, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))]

    slabs = walked(decided(body, *LAYER)).slabs
    assert steps_of_slab(slabs.group.graph)[1] == {} and slabs.held_at(SIZES) == 2 * LOGITS


# ------------------------------------------------------------------ in numbers
@pytest.mark.parametrize("rows", [1, 7, 16, 32, 64])
def test_slabs_add_up(rows: int) -> None:
    """The graph of a slab, run for each and put together, is the region's."""
    sizes = {T: 48, H: 8, V: 40}
    random = np.random.default_rng(3)
    x, w = (random.standard_normal(shape) for shape in ((48, 8), (40, 8)))
    body = lambda x, w: gradients(x, w, log_sums(x, w))  # noqa: E731
    slabs: Slabs = walked(divided(body, *LAYER, limit=100, dtype="f64", sizes=sizes)[1]).slabs
    assert slabs.symbol == T
    dx, dw = [], np.zeros((40, 8))
    for start in range(0, 48, rows):
        count = min(rows, 48 - start)
        parts = [v if e.axis is None else v[start : start + count] for v, e in zip((x, w), slabs.inputs, strict=True)]
        outputs = evaluate(slabs.group.graph, parts, slabs.sizes(sizes, count, start))
        by_axis = {e.axis: np.asarray(o) for o, e in zip(outputs, slabs.outputs, strict=True)}
        dx.append(by_axis[0])
        dw += by_axis[None]
    z = x @ w.T
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    np.testing.assert_allclose(np.concatenate(dx), p @ w, rtol=1e-10)
    np.testing.assert_allclose(dw, p.T @ x, rtol=1e-10)


def test_memory_is_told_by_what_runs_it() -> None:
    graph = walked(decided(log_sums, *LAYER)).slabs.group.graph
    at = [max(int(size.subs(SIZES)) for size in held(graph)) for held in (held_by_steps, held_by_nodes)]
    assert at[0] == LOGITS and at[1] >= 2 * LOGITS
