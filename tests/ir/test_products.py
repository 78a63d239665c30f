"""Which products become kernels, with what around them, and what the decision says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sympy

from fusegrad.ir import Graph, TensorType, Value, building, emit
from fusegrad.ir.passes.fuse import Extern, Fuse, View
from fusegrad.ir.passes.products import Decision, Estimate, Machine, Products

MACHINE = Machine(3.0e12, {"f16": 900e12, "bf16": 900e12, "f32": 60e12})
M = sympy.Symbol("m", positive=True, integer=True)


def product(x: Value, y: Value) -> Value:
    return emit("dot", x, y, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))


def decided(
    body: Any, *shapes: tuple[Any, ...], dtype: str = "bf16", **options: Any
) -> tuple[list[Any], list[Decision]]:
    graph = Graph("body")
    with building(graph):
        inputs = [graph.input(TensorType(s, dtype), f"x{i}") for i, s in enumerate(shapes)]
        made = body(*inputs)
    graph.returning(list(made) if isinstance(made, tuple) else [made])
    return Products(MACHINE, {M: 4096}, **options)(graph, Fuse()(graph))


def kinds(steps: list[Any]) -> list[str]:
    """G for a group without, P for one with a product."""
    names = {Extern: "extern", View: "view"}
    return [names.get(type(s)) or ("P" if any(v.prim == "dot" for v in s.graph.order()) else "G") for s in steps]


WIDE = (M, 64), (64, 4096)
DEEP = (M, 4096), (4096, 4096)


def test_memory_decides_and_arithmetic_goes_to_the_library() -> None:
    activated = lambda x, w: emit("sigmoid", product(x, w))  # noqa: E731
    steps, (decision,) = decided(activated, *WIDE)
    assert (
        kinds(steps) == ["P"]
        and decision.fused
        and "operations per byte where memory decides up to 150" in str(decision)
    )
    steps, (decision,) = decided(activated, *DEEP)
    assert (
        kinds(steps) == ["extern", "G"]
        and not decision.fused
        and str(decision).startswith("product %2: by the library")
    )
    assert kinds(decided(activated, *DEEP, contest=True)[0]) == ["P"], "a clock has the last word"
    assert kinds(decided(activated, *WIDE, library=frozenset([decision.value.id]))[0]) == ["extern", "G"]
    assert kinds(decided(activated, *WIDE, dtype="f32")[0]) == ["extern", "G"], "ten operations per byte"
    assert kinds(decided(activated, (M, 8), (8, 4096), dtype="f32")[0]) == ["P"]
    assert kinds(decided(activated, *WIDE, dtype="f64")[0]) == ["extern", "G"]


def test_a_product_alone_stays_a_call() -> None:
    assert decided(product, *WIDE)[1] == []
    assert kinds(decided(lambda x, w: emit("sum", product(x, w), axes=(1,)), *WIDE)[0]) == ["extern", "G"]
    assert kinds(decided(lambda x, w: emit("sigmoid", product(x, w)), (1, 64), (64, 4096))[0]) == ["extern", "G"]


def test_a_product_with_a_diagonal_is_the_librarys() -> None:
    def right(x: Value, w: Value) -> Value:
        return emit("sigmoid", emit("dot", x, w, x_axes=(0, 1), y_axes=(1, 2, 2), out_axes=(0, 2)))

    def left(x: Value, w: Value) -> Value:
        return emit("sigmoid", emit("dot", x, w, x_axes=(0, 0, 1), y_axes=(1, 2), out_axes=(0, 2)))

    assert kinds(decided(right, (M, 64), (64, 4096, 4096))[0]) == ["extern", "G"]
    assert kinds(decided(left, (M, M, 64), (64, 4096))[0]) == ["extern", "G"]


def test_a_result_that_is_read_elsewhere_is_written_too() -> None:
    def body(x: Value, w: Value) -> tuple[Value, ...]:
        h = product(x, w)
        return emit("sigmoid", h), h, emit("amax", h, axes=(1,))

    steps, _ = decided(body, *WIDE)
    assert kinds(steps) == ["extern", "G"], "the maximum is in the group"
    steps, _ = decided(lambda x, w: body(x, w)[:2], *WIDE)
    assert kinds(steps) == ["P"] and len(steps[0].outputs) == 2


def test_prologues_of_one_product_or_of_several() -> None:
    scaled = lambda x: emit("mul", x, emit("full", value=0.5, shape=x.shape, dtype=x.dtype))  # noqa: E731

    def one(x: Value, w: Value) -> Value:
        return product(scaled(x), w)

    def both(x: Value, w: Value, v: Value) -> tuple[Value, ...]:
        s = scaled(x)
        return product(s, w), product(emit("permute", s, perm=(1, 0)), v)

    assert kinds(decided(one, (M, 4096), (4096, 64))[0]) == ["P"]
    steps, decisions = decided(both, (M, 4096), (4096, 64), (M, 64))
    assert kinds(steps) == ["P", "P"] and all(d.fused for d in decisions)
    assert kinds(decided(lambda x, w: (product(s := scaled(x), w), s), (M, 4096), (4096, 64))[0]) == ["G", "extern"]


def test_what_sums_or_makes_no_operand_is_no_prologue() -> None:
    def softened(x: Value, w: Value) -> Value:
        total = emit("sum", x, axes=(1,))
        return product(emit("div", x, emit("broadcast", total, shape=x.shape, axes=(0,))), w)

    def beside(x: Value, w: Value, v: Value, u: Value) -> tuple[Value, Value]:
        return emit("sigmoid", product(x, w)), emit("sigmoid", product(emit("exp", v), u))

    assert kinds(decided(softened, (M, 4096), (4096, 64))[0]) == ["G", "extern"]
    steps, _ = decided(beside, *WIDE, *DEEP)
    assert sorted(kinds(steps)) == ["G", "G", "P", "extern"], "the first is one kernel and takes nothing of the second"


def test_what_was_only_widened_is_multiplied_as_it_was() -> None:
    def body(x: Value, w: Value) -> Value:
        return emit("sigmoid", product(*(emit("cast", v, dtype="f32") for v in (x, w))))

    steps, (decision,) = decided(body, *DEEP)
    assert kinds(steps) == ["P"] and decision.fused, "450 against 60 operations a picosecond"


def test_products_join_one_group_unless_one_reads_the_other() -> None:
    def gated(x: Value, w: Value, v: Value) -> Value:
        return emit("mul", emit("sigmoid", product(x, w)), product(x, v))

    def chained(x: Value, w: Value, a: Value, b: Value) -> Value:
        return emit("add", product(x, w), product(product(x, a), b))

    steps, decisions = decided(gated, *WIDE, WIDE[1])
    assert kinds(steps) == ["P"] and [d.group for d in decisions] == [steps[0]] * 2
    steps, decisions = decided(chained, *WIDE, (64, 16), (16, 4096))
    assert kinds(steps) == ["extern", "P"] and steps[0].value.shape == (M, 16), "the inner one is made first"
    assert [d.fused for d in decisions] == [True, True]


def test_an_operand_for_two_products_may_read_a_little_more_than_it_has() -> None:
    def body(x: Value, r: Value, m: Value, w: Value, v: Value) -> Value:
        scaled = emit("mul", x, emit("broadcast", r, shape=x.shape, axes=(0,)))
        scaled = emit("mul", scaled, m) if m.shape == x.shape else scaled
        return emit("mul", product(scaled, w), product(scaled, v))

    shapes = (M, 64), (M,), (M,), WIDE[1], WIDE[1]
    assert kinds(decided(body, *shapes)[0]) == ["P"]
    assert kinds(decided(body, *shapes[:2], (M, 64), *shapes[3:])[0]) == ["G", "P"], "twice the bytes, twice"


def test_one_result_of_several_may_be_an_operand() -> None:
    """The others stay in the group, which no longer writes it."""

    def body(x: Value, w: Value) -> tuple[Value, ...]:
        return product(emit("exp", x), w), emit("sigmoid", x)

    steps, (decision,) = decided(body, (M, 4096), (4096, 64))
    assert sorted(kinds(steps)) == ["G", "P"] and decision.fused
    (others,) = [s for s in steps if s is not decision.group]
    assert [v.prim for v in others.outputs] == ["sigmoid"]


def test_what_is_gathered_may_be_an_operand() -> None:
    def body(x: Value, w: Value) -> Value:
        expert = emit("iota", size=512, dtype="i64")
        weights = emit("gather", w, expert, axes=(0,))
        return emit("dot", x, weights, x_axes=(3, 0, 1), y_axes=(3, 1, 2), out_axes=(3, 0, 2))

    assert kinds(decided(body, (512, 64, 64), (8, 64, 512))[0]) == ["P"]


def test_the_model() -> None:
    found = Estimate(1000, 50, 100, 60, bandwidth=1.0, library_rate=10.0, own_rate=10.0)
    assert found.library == 150.0 and found.own == 200.0 and not found.memory_decides and not found.pays
    assert not Estimate(500, 50, 100, 60, bandwidth=1.0, library_rate=10.0, own_rate=10.0).memory_decides
    found = Estimate(100, 50, 100, 60, bandwidth=1.0, library_rate=10.0, own_rate=10.0)
    assert (found.library, found.own) == (100.0, 60.0) and found.memory_decides and found.pays
    found = replace(found, operations=500, apart=300, beside=250)
    assert (found.library, found.own) == (300.0, 150.0) and not found.memory_decides and found.pays, "twice as fast"
    assert not replace(found, operations=501).pays, "not quite"
    assert replace(found, beside=2000).library == 450.0, "the kernel around the call has arithmetic of its own"


@pytest.mark.parametrize("effect", [False, True])
def test_nothing_moves_across_an_effect(effect: bool) -> None:
    def body(x: Value, w: Value) -> Value:
        h = product(x, w)
        called = emit("aten_effect" if effect else "aten", w, op="aten.f", spec=((), ()), avals=(h.aval,))
        return emit("add", h, called)

    assert ("P" in kinds(decided(body, *WIDE)[0])) is not effect
