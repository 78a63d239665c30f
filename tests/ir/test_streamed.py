"""The residuals of programs whose products are streamed: what is saved of an attention, and that gradients agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import sympy

from fusegrad.ir import Graph, Program, TensorType, Value, ValueRef, building, emit, verify
from fusegrad.ir.passes.fuse import Fuse
from fusegrad.ir.passes.products import Machine
from fusegrad.ir.passes.programs.recompute import CHOICE, apply_choice, hidden_values, present
from fusegrad.ir.passes.programs.streamed import Streamed
from fusegrad.ir.passes.streaming.streams import Streams
from fusegrad.ir.passes.virtual import sums_of, virtual_values
from fusegrad.ir.switches import switched_off

N, M, D = sympy.symbols("n m d", integer=True, positive=True)
SIZES = {N: 7, M: 9, D: 3}
INPUTS = [ValueRef("input", i) for i in range(3)]
OUT, HIDDEN = ValueRef("output", 0), ValueRef("hidden", 0)


def dot(x: Value, y: Value, labels: str) -> Value:
    """dot(x, y, "id,jd->ij")"""
    left, right, out = (tuple(map("ijd".index, side)) for side in labels.replace("->", ",").split(","))
    return emit("dot", x, y, x_axes=left, y_axes=right, out_axes=out)


def rows(value: Value) -> Value:
    return emit("broadcast", value, shape=(N, M), axes=(0,))


def softmax(q: Value, k: Value) -> Value:
    s = dot(q, k, "id,jd->ij")
    e = emit("exp", emit("sub", s, rows(emit("amax", s, axes=(1,)))))
    return emit("div", e, rows(emit("sum", e, axes=(1,))))


def program(residuals: Sequence[ValueRef], again: bool, row_sums: str, dtype: str = "f32") -> Program:
    """Attention that saves these, or has p again; row sums "of p" or "of out"."""
    forward = Graph("forward")
    q, k, v = (forward.input(TensorType(s, dtype), n) for n, s in {"q": (N, D), "k": (M, D), "v": (M, D)}.items())
    with building(forward):
        p = softmax(q, k)
        out = dot(p, v, "ij,jd->id")
    forward.returning([out, p] if HIDDEN in residuals else [out])
    made = Program("attention", verify(forward), tuple(residuals), 1)
    backward = Graph("backward")
    received = {place: backward.input(_value(made, place).aval, f"r{i}") for i, place in enumerate(residuals)}
    g = backward.input(out.aval, "g")
    with building(backward):
        backward.returning(_gradients(received, g, again, row_sums))
    made.backward[(True,)] = verify(backward)
    return made


def _value(made: Program, place: ValueRef) -> Value:
    return made.forward.inputs[place.index] if place.kind == "input" else made.forward.outputs[place == HIDDEN]


def _gradients(received: dict[ValueRef, Value], g: Value, again: bool, row_sums: str) -> list[Value]:
    q, k, v = (received[i] for i in INPUTS)
    p, dp = softmax(q, k) if again else received[HIDDEN], dot(g, v, "id,jd->ij")
    delta = emit("mul", g, received[OUT]) if row_sums == "of out" else emit("mul", p, dp)
    ds = emit("mul", p, emit("sub", dp, rows(emit("sum", delta, axes=(1,)))))
    return [dot(ds, k, "ij,jd->id"), dot(ds, q, "ij,id->jd"), dot(p, g, "ij,id->jd")]


def gradients(made: Program, run: Callable, mask: tuple[bool, ...] = (True,)) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=[SIZES[n] for n in v.shape]) for v in made.forward.inputs]
    results = run(made.forward, arrays, SIZES)
    places = {"input": arrays, "output": results[:1], "hidden": results[1:]}
    residuals = [places[p.kind][p.index] for p in present(made)]
    return run(made.backward[mask], [*residuals, rng.normal(size=(7, 3))], SIZES)


def streamed(before: Program, run: Callable) -> list[str]:
    """What is saved besides what the user sees, by the primitives that make it, once gradients were compared."""
    after = Streamed(SIZES)(before)
    for a, b in zip(gradients(before, run), gradients(after, run), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-11)
    virtual = virtual_values(after.forward, SIZES)
    assert not [v for v in hidden_values(after) if v.id in virtual]
    return [v.prim for v in hidden_values(after)]


SAVES_P, SAVES_NOTHING = [*INPUTS, HIDDEN], INPUTS


@pytest.mark.parametrize(("residuals", "again"), [(SAVES_P, False), (SAVES_NOTHING, True)])
def test_rows_and_the_result_whether_p_is_saved_or_computed_again(
    residuals: list[ValueRef], again: bool, run: Callable
) -> None:
    assert streamed(program(residuals, again, "of p"), run) == ["amax", "sum", "reshape"]


def test_a_result_that_the_user_saved_is_not_saved_twice(run) -> None:
    assert streamed(program([*INPUTS, OUT], True, "of out"), run) == ["amax", "sum"]
    before = program([*INPUTS, OUT], True, "of p")
    assert streamed(before, run) == ["amax", "sum"]
    assert Streamed(SIZES)(before).attributes[CHOICE].brackets == (before.forward.outputs[0],)


def test_the_result_is_handed_over_in_memory_of_its_own(run) -> None:
    """The caller may write to what is returned: one region makes both, and nothing is copied."""
    after = Streamed(SIZES)(program(SAVES_P, False, "of p"))
    returned, saved = after.forward.outputs[0], after.forward.outputs[-1]
    assert returned is not None and saved is not None and returned != saved and saved.shape == (1, N, D)
    steps, (decision,) = Streams(Machine(1e9, {"f32": 1e15}), SIZES)(after.forward, Fuse()(after.forward))
    assert decision.streamed and [s.results for s in steps] == [tuple(after.forward.outputs[i] for i in (1, 2, 0, 3))]


def test_without_the_exchange_the_row_sums_are_those_of_p(run) -> None:
    with switched_off(("exchange",)):
        after = Streamed(SIZES)(program(SAVES_P, False, "of p"))
    assert [v.prim for v in hidden_values(after)] == ["amax", "sum"]
    graph = after.backward[(True,)]
    assert "sum" in [v.prim for v in sums_of(graph.order(), virtual_values(graph, SIZES))]


def test_rows_of_low_floats_are_handed_over_as_float32() -> None:
    after = Streamed(SIZES)(program(SAVES_P, False, "of p", "bf16"))
    hidden = [("cast", "f32"), ("reciprocal", "f32"), ("reshape", "bf16")]  # backward divides by the sums
    assert [(v.prim, v.dtype) for v in hidden_values(after)] == hidden
    graph = after.backward[(True,)]
    assert [v.dtype for v in graph.inputs] == ["bf16", "bf16", "bf16", "f32", "f32", "bf16", "bf16"]
    assert [v.dtype for v in verify(graph).outputs] == ["bf16"] * 3


def test_other_backwards_of_the_same_program_start_from_the_same(run) -> None:
    """One for another mask, which is captured later."""
    before = program(SAVES_P, False, "of p")
    after, later = Streamed(SIZES)(before), before.backward[(True,)].copy()
    apply_choice(after, (False,), later)
    before.backward[(False,)] = later
    for a, b in zip(gradients(before, run, (False,)), gradients(after, run, (False,)), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-11)


def test_operands_that_are_not_saved_are_copied_unless_forward_writes_to_them() -> None:
    """Nothing else makes p again; of what forward changes there is no copy to be had."""
    before = program(SAVES_P, False, "of p")
    forward = before.forward
    backward = Graph("backward")
    p, g = (backward.input(TensorType(s, "f32"), n) for n, s in {"p": (N, M), "g": (N, D)}.items())
    with building(backward):
        backward.returning([dot(p, g, "ij,id->jd")])
    held = Program("attention", forward, (HIDDEN,), 1, {(True,): backward})
    saved = Streamed(SIZES)(held).attributes[CHOICE].saved
    assert forward.inputs[0] in saved and forward.inputs[1] in saved and p.shape not in [v.shape for v in saved]
    forward.mutations = {1: forward.inputs[1]}
    assert Streamed(SIZES)(held) is held


def test_where_nothing_is_virtual_nothing_changes() -> None:
    before = program(SAVES_P, False, "of p")
    assert Streamed({N: 3, M: 2, D: 8})(before) is before
    without_backward = Program("f", before.forward, before.residuals, 1)
    assert Streamed(SIZES)(without_backward) is without_backward
