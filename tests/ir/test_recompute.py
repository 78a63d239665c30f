"""Recompute: which values forward hands over, and that backward then computes the same bits."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from fusegrad.ir import Graph, Program, TensorType, Value, ValueRef, building, emit, provenance, show, verify
from fusegrad.ir.graph import Origin
from fusegrad.ir.passes.cost import estimate
from fusegrad.ir.passes.programs.overlap import overlap_of
from fusegrad.ir.passes.programs.recompute import Recompute, apply_choice, hidden_values
from fusegrad.ir.passes.simplify import Simplify

M = sympy.Symbol("M", integer=True, positive=True)
N = 8
X = TensorType((M, N), "bf16")
W = TensorType((N,), "bf16")
F32 = TensorType((M, N), "f32")
Build = Callable[..., list[Value]]


def program(forward: Build, inputs: dict[str, TensorType], residuals: Sequence[ValueRef], backward: Build) -> Program:
    """forward(*inputs) -> [y, *hidden]; backward(*residuals, gradient) -> gradients."""
    graph = Graph("forward")
    values = [graph.input(t, n) for n, t in inputs.items()]
    with building(graph):
        graph.returning(forward(*values))
    made = Program("f", verify(graph), tuple(residuals), 1)
    made.backward[(True,)] = backward_graph(made, backward)
    return made


def backward_graph(made: Program, backward: Build) -> Graph:
    graph = Graph("backward")
    received = [graph.input(aval_of(made, p), f"r{i}") for i, p in enumerate(made.residuals)]
    gradient = graph.input(made.forward.outputs[0].aval, "y_bar")
    with building(graph):
        graph.returning(backward(*received, gradient))
    return verify(graph)


def aval_of(made: Program, place: ValueRef) -> TensorType:
    if place.kind == "input":
        return made.forward.inputs[place.index].aval
    return made.forward.outputs[place.index + (1 if place.kind == "hidden" else 0)].aval


def saved(made: Program) -> list[str]:
    return [str(v.origin.name or v.prim) for v in hidden_values(made)]


def bytes_saved(made: Program) -> int:
    return sum(estimate(v.aval.nbytes) for v in hidden_values(made))


def gradients(made: Program, run: Callable, arrays: Sequence[np.ndarray], mask: tuple[bool, ...] = (True,)) -> list:
    """forward, then backward with a gradient of ones."""
    results = run(made.forward, arrays)
    where = {"input": arrays, "output": results[:1], "hidden": results[1:]}
    residuals = [where[p.kind][p.index] for p in made.residuals]
    return run(made.backward[mask], [*residuals, np.ones_like(results[0], dtype=np.float32)])


def assert_same_gradients(before: Program, after: Program, run: Callable, arrays: Sequence[np.ndarray]) -> None:
    for mask in before.backward:
        verify(after.backward[mask])
        for a, b in zip(gradients(before, run, arrays, mask), gradients(after, run, arrays, mask), strict=True):
            np.testing.assert_array_equal(b, a)


def named(name: str, prim: str, *args: Value, **params: object) -> Value:
    with provenance(Origin(name)):
        return emit(prim, *args, **params)


def up(x: Value) -> Value:
    return emit("cast", x, dtype="f32")


def wide(x: Value, axis: int) -> Value:
    return emit("broadcast", x, shape=(M, N), axes=(axis,))


def rms_forward(x: Value, w: Value) -> list[Value]:
    total = named("total", "sum", emit("mul", up(x), up(x)), axes=(1,))
    rstd = named("rstd", "rsqrt", total)
    x_hat = named("x_hat", "mul", up(x), wide(rstd, 0))
    return [emit("cast", emit("mul", x_hat, wide(up(w), 1)), dtype="bf16"), x_hat, rstd]


def rms_backward(x: Value, w: Value, x_hat: Value, rstd: Value, y_bar: Value) -> list[Value]:
    g = emit("mul", up(y_bar), wide(up(w), 1))
    mean = emit("sum", emit("mul", g, x_hat), axes=(1,))
    x_bar = emit("mul", emit("sub", g, emit("mul", x_hat, wide(mean, 0))), wide(rstd, 0))
    return [x_bar, emit("sum", emit("mul", up(y_bar), x_hat), axes=(0,))]


RMS = [ValueRef("input", 0), ValueRef("input", 1), ValueRef("hidden", 0), ValueRef("hidden", 1)]


def rms() -> Program:
    return program(rms_forward, {"x": X, "w": W}, RMS, rms_backward)


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.round(rng.normal(size=s) * 8) / 8 for s in shapes]


def test_rstd_is_saved_in_place_of_x_hat(run) -> None:
    before = rms()
    after = Recompute()(before)
    assert saved(before) == ["x_hat", "rstd"]
    assert saved(after) == ["rstd"]
    assert after.residuals == (ValueRef("input", 0), ValueRef("input", 1), ValueRef("hidden", 0))
    assert_same_gradients(before, after, run, arrays((3, N), (N,)))


def test_the_outputs_of_the_user_stay_as_they_are() -> None:
    before, after = rms(), Recompute()(rms())
    assert after.forward.outputs[0].aval == before.forward.outputs[0].aval
    assert len(after.forward.outputs) == 2 and after.user_outputs == 1
    assert [v.params["name"] for v in after.backward[(True,)].inputs] == ["r0", "r1", "rstd", "y_bar"]


def test_an_input_that_the_user_did_not_save_is_not_held(run) -> None:
    """Without x, x_hat cannot be made again."""
    before = program(
        rms_forward, {"x": X, "w": W}, [RMS[1], RMS[2], RMS[3]], lambda w, h, r, g: rms_backward(h, w, h, r, g)
    )
    assert Recompute()(before) is before


def test_an_input_that_forward_writes_to_is_not_read_again() -> None:
    before = rms()
    with building(before.forward):
        before.forward.mutations[0] = emit("neg", before.forward.inputs[0])
    assert Recompute()(before) is before


def test_of_equal_cuts_the_one_nearest_to_backward_is_taken() -> None:
    """rstd and the sum under it have as many bytes."""
    assert "rsqrt" not in show(Recompute()(rms()).backward[(True,)])


def test_a_view_of_an_input_that_is_saved_as_it_is_stays_so() -> None:
    """x.view(x.shape) is x in the graph, and a hidden value all the same."""
    made = program(
        lambda x: [emit("exp", x), x], {"x": F32}, [ValueRef("hidden", 0)], lambda r, g: [emit("mul", g, r)]
    )  # fmt: skip
    (kept,) = hidden_values(Recompute()(made))
    assert kept.prim == "input"


def test_a_saved_output_serves_backward(run) -> None:
    """y is saved anyway: exp's derivative, kept apart by the user, comes from it."""

    def forward(x: Value) -> list[Value]:
        y = emit("exp", x)
        return [y, named("slope", "mul", y, y)]

    before = program(
        forward,
        {"x": F32},
        [ValueRef("output", 0), ValueRef("hidden", 0)],
        lambda y, d, g: [emit("mul", emit("add", d, y), g)],
    )
    after = Recompute()(before)
    assert saved(after) == [] and after.residuals == (ValueRef("output", 0),)
    assert_same_gradients(before, after, run, arrays((3, N)))


def test_more_reading_than_saving_is_not_worth_it() -> None:
    """The sum of four inputs that backward reads nothing else of: four reads against a write and a read."""

    def forward(*xs: Value) -> list[Value]:
        total = emit("add", emit("add", xs[0], xs[1]), emit("add", xs[2], xs[3]))
        return [emit("exp", total), total]

    places = [*(ValueRef("input", i) for i in range(4)), ValueRef("hidden", 0)]
    inputs = {f"x{i}": F32 for i in range(4)}
    lazy = program(forward, inputs, places, lambda a, b, c, d, total, g: [emit("mul", total, g)])
    assert Recompute()(lazy) is lazy
    reading = program(forward, inputs, places, lambda a, b, c, d, total, g: [
        emit("mul", emit("mul", emit("mul", a, b), emit("mul", c, d)), emit("mul", total, g))])  # fmt: skip
    assert saved(Recompute()(reading)) == []


def test_of_what_is_saved_a_part_is_read_at_the_price_of_the_part(run) -> None:
    """exp of half of x, that backward reads nothing else of: a read of the half against a write and a read."""

    def forward(x: Value) -> list[Value]:
        half = emit("slice", x, start=(0, 0), stop=(M, N // 2), step=(1, 1))
        made = emit("exp", half)
        return [emit("pad", made, lo=(0, 0), hi=(0, N // 2), inner=(0, 0)), made]

    def backward(x: Value, made: Value, g: Value) -> list[Value]:
        return [emit("mul", made, emit("slice", g, start=(0, 0), stop=(M, N // 2), step=(1, 1)))]

    before = program(forward, {"x": F32}, [ValueRef("input", 0), ValueRef("hidden", 0)], backward)
    after = Recompute()(before)
    assert saved(before) == ["exp"] and saved(after) == []
    assert_same_gradients(before, after, run, arrays((3, N)))


SEED = TensorType((), "i64")


def test_a_random_mask_is_drawn_again(run) -> None:
    def forward(x: Value, seed: Value, offset: Value) -> list[Value]:
        noise = emit("random", seed, offset, shape=(M, N), dtype="f32", kind="uniform")
        keep = named("keep", "gt", noise, emit("full", value=0.5, shape=(M, N), dtype="f32"))
        zero = emit("full", value=0.0, shape=(M, N), dtype="f32")
        return [emit("where", keep, x, zero), keep]

    before = program(
        forward,
        {"x": F32, "seed": SEED, "offset": SEED},
        [ValueRef("input", 1), ValueRef("input", 2), ValueRef("hidden", 0)],
        lambda seed, offset, keep, g: [emit("where", keep, g, emit("full", value=0.0, shape=(M, N), dtype="f32"))],
    )
    after = Recompute()(before)
    assert saved(after) == []
    assert "random" in show(after.backward[(True,)])
    assert_same_gradients(before, after, run, [*arrays((3, N)), np.int64(7), np.int64(3)])


@pytest.mark.parametrize("prim", ["sum", "dot", "cumsum", "aten", "aten_effect"])
def test_what_is_dear_or_has_effects_is_not_done_twice(prim: str) -> None:
    params = {
        "sum": {"axes": (0,)}, "cumsum": {"axis": 0, "reverse": False},
        "dot": {"x_axes": (0, 1), "y_axes": (0, 2), "out_axes": (1, 2)},
        "aten": {"op": "aten.x", "spec": (), "avals": (F32,)},
        "aten_effect": {"op": "aten.x", "spec": (), "avals": (F32,)},
    }[prim]  # fmt: skip

    def forward(x: Value) -> list[Value]:
        kept = emit(prim, *([x, x] if prim == "dot" else [x]), **params)
        return [x, kept]

    before = program(
        forward, {"x": F32}, [ValueRef("input", 0), ValueRef("hidden", 0)], lambda x, kept, g: [emit("mul", kept, kept)]
    )
    assert Recompute()(before) is before


def test_a_backward_for_another_mask_starts_from_the_same_residuals(run) -> None:
    before = rms()
    after = Recompute()(before)
    later = backward_graph(before, lambda x, w, x_hat, rstd, g: [emit("mul", x_hat, wide(rstd, 0)), None])
    before.backward[(False,)] = later
    assert apply_choice(after, (False,), later) is after.backward[(False,)]
    assert_same_gradients(before, after, run, arrays((3, N), (N,)))


def test_without_a_choice_a_backward_is_kept_as_it_is() -> None:
    plain = rms()
    later = backward_graph(plain, lambda *received: [received[-1], None])
    assert apply_choice(plain, (False,), later) is later is plain.backward[(False,)]


def test_a_residual_that_is_none_has_no_input() -> None:
    before = replace(rms(), residuals=(None, *RMS))
    after = Recompute()(before)
    assert after.residuals == (None, ValueRef("input", 0), ValueRef("input", 1), ValueRef("hidden", 0))
    verify(after.backward[(True,)])


def test_the_pass_is_known_by_what_it_does() -> None:
    assert hash(Recompute({M: 3})) == hash(Recompute({M: 4})) and Recompute({M: 3}) != Recompute({M: 4})


def test_nothing_is_decided_before_there_is_a_backward() -> None:
    before = replace(rms(), backward={})
    assert Recompute()(before) is before


def test_it_simplifies_afterwards() -> None:
    after = Recompute()(rms())
    assert verify(Simplify()(after.forward)) and verify(Simplify()(after.backward[(True,)]))


def test_a_derived_backward_takes_over_what_forward_had(run) -> None:
    """backward was captured of the arguments alone, and does the product and its sum again."""
    square, vector = TensorType((M, M), "f32"), TensorType((M,), "f32")

    def product(x: Value, y: Value) -> Value:
        return emit("dot", x, y, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))

    def backward(x: Value, w: Value, y_bar: Value) -> list[Value]:
        y = emit("tanh", emit("sum", product(x, w), axes=(1,)))
        return [emit("mul", y_bar, emit("mul", y, y))]

    before = program(
        lambda x, w: [emit("tanh", emit("sum", product(x, w), axes=(1,)))], {"x": square, "w": square},
        [ValueRef("input", 0), ValueRef("input", 1)], backward,
    )  # fmt: skip
    found = overlap_of(before)
    assert found is not None and found.choose(found.offered((True,)), {M: 64})
    assert [v.aval for v in found.saved] == [vector]
    after = found.program_now()
    assert "dot" not in [v.prim for v in after.backward[(True,)].order()]
    assert_same_gradients(before, after, run, arrays((3, 3), (3, 3)))


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_random_programs(grow, run, inputs_for, seed: int) -> None:
    """Any inputs saved, any values hidden: the same gradients, from no more bytes."""
    forward = Simplify()(grow(seed, 30))
    rng = np.random.default_rng(seed)
    nodes = [v for v in forward.order() if v.prim != "full"]
    hidden = [nodes[i] for i in rng.choice(len(nodes), size=min(3, len(nodes)), replace=False)] if nodes else []
    held = [ValueRef("input", i) for i in range(len(forward.inputs)) if rng.random() < 0.7]
    outputs = [o for o in forward.outputs if o is not None][:1]
    forward.returning([*outputs, *hidden])
    before = Program("f", forward, (*held, *(ValueRef("hidden", i) for i in range(len(hidden)))), len(outputs))
    before.backward[(True,)] = backward_graph(before, lambda *received: list(received[:-1]))
    after = Recompute()(before)
    assert bytes_saved(after) <= bytes_saved(before)
    arrays_in = inputs_for(forward, seed)
    assert_same_gradients(before, after, run, arrays_in)
