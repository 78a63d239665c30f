"""Loops in normal form, by their text; and random loops, before and after all passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from loop_samples import T, f64
from test_random_loops import LENGTHS, SEEDS, Program, close, numbers, sizes

from fusegrad.ir import Graph, Value, building, emit, verify
from fusegrad.ir.evaluate import evaluate
from fusegrad.ir.loops.body import Body
from fusegrad.ir.loops.loop import results_of
from fusegrad.ir.loops.tidy import TidyLoops
from fusegrad.ir.passes.contract import Contract
from fusegrad.ir.passes.simplify import Simplify
from fusegrad.ir.transforms.transpose import vjp

Step = Callable[..., Sequence[Value]]


def loop(step: Step, carries: int, *operands: Value, reverse: bool = False) -> list[Value]:
    """A loop over the operands of T steps; the others behind these are wholes."""
    xs = [x for x in operands[carries:] if x.ndim and x.shape[0] == T]
    body = Graph("step")
    types = [x.aval.with_shape(x.shape[1:]) if x in xs else x.aval for x in operands]
    inputs = [body.input(t, f"s{i}") for i, t in enumerate(types)]
    with building(body):
        body.returning(list(step(*inputs)))
    params = {"carries": carries, "steps": len(operands[carries:][: len(xs)]), "length": T, "reverse": reverse}
    return results_of(emit("scan", *operands, body=Body(body), **params))


def graph(build: Callable[..., Sequence[Value]], *shapes: Any) -> Graph:
    made = Graph("loop")
    inputs = [made.input(f64(*s), f"x{i}") for i, s in enumerate(shapes)]
    with building(made):
        return made.returning(list(build(*inputs)))


def add(x: Value, y: Value) -> Value:
    return emit("add", x, y)


def mul(x: Value, y: Value) -> Value:
    return emit("mul", x, y)


def spread(x: Value) -> Value:
    return emit("broadcast", x, shape=(T, *x.shape), axes=tuple(range(1, x.ndim + 1)))


def flip(x: Value) -> Value:
    return emit("flip", x, axes=(0,))


def zeros_for_each_step() -> Value:
    return emit("full", value=0.0, shape=ROWS, dtype="f64")


ROW, ROWS = (3,), (T, 3)
CASES: dict[str, tuple[Callable[..., Sequence[Value]], Sequence[Any], tuple[int, int, int]]] = {
    "a carry that stays": (
        lambda h, k, x: loop(lambda h, k, x: [add(h, mul(k, x)), k, mul(h, k)], 2, h, k, x),
        (ROW, ROW, ROWS), (1, 1, 1),
    ),
    "an x that is spread along time": (
        lambda h, w, x: loop(lambda h, w, x: [add(h, mul(w, x))], 1, h, spread(w), x), (ROW, ROW, ROWS), (1, 1, 1),
    ),
    "zeros for each step": (
        lambda h, x: loop(lambda h, x, z: [add(mul(h, x), z)], 1, h, x, zeros_for_each_step()),
        (ROW, ROWS), (1, 1, 0),
    ),
    "an operand given twice": (
        lambda h, x, w: loop(lambda h, x, y, w, v: [add(mul(h, x), mul(y, mul(w, v)))], 1, h, x, x, w, w),
        (ROW, ROWS, ROW), (1, 1, 1),
    ),
    "results that are operands": (
        lambda h, x, w: loop(lambda h, x, w: [add(mul(h, x), w), x, w, h], 1, h, x, w), (ROW, ROWS, ROW), (1, 1, 1),
    ),
    "all steps flipped": (
        lambda h, x, y: [flip(loop(lambda h, x, y: [add(mul(h, x), y), h], 1, h, flip(x), flip(y))[1])],
        (ROW, ROWS, ROWS), (1, 2, 0),
    ),
    "what no result needs": (
        lambda h, k, x, y: [loop(lambda h, k, x, y: [add(h, x), mul(k, y), mul(k, x)], 2, h, k, x, y)[0]],
        (ROW, ROW, ROWS, ROWS), (1, 1, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_carried_or_read_that_need_not_be(name: str) -> None:
    build, shapes, counts = CASES[name]
    before = verify(graph(build, *shapes))
    after = verify(Simplify()(TidyLoops()(before)))
    (scan,) = (v for v in after.order() if v.prim == "scan")
    carries, steps = scan.params["carries"], scan.params["steps"]
    assert (carries, steps, len(scan.args) - carries - steps) == counts
    for length in (0, 1, 4):
        inputs = numbers(before, length, length)
        close(evaluate(after, inputs, sizes(length)), evaluate(before, inputs, sizes(length)))


def test_steps_that_are_all_flipped_turn_the_loop() -> None:
    build, shapes, _ = CASES["all steps flipped"]
    after = Simplify()(TidyLoops()(graph(build, *shapes)))
    assert [v.prim for v in after.order()] == ["scan", "pick"]
    assert next(iter(after.order())).params["reverse"]


def test_a_loop_that_carries_nothing_on_is_no_loop() -> None:
    after = TidyLoops()(graph(lambda h, x: loop(lambda h, x: [h, x], 1, h, x), ROW, ROWS))
    assert [v.prim for v in after.order()] == [] and after.outputs == after.inputs


def test_bodies_are_simplified_and_their_sums_of_products_contracted() -> None:
    def step(h: Value, x: Value, w: Value) -> list[Value]:
        left, right = (emit("broadcast", v, shape=(2, 3, 4), axes=a) for v, a in ((x, (0, 1)), (w, (1, 2))))
        one = emit("full", value=1.0, shape=(2, 4), dtype="f64")
        return [mul(add(h, emit("sum", mul(left, right), axes=(1,))), one)]

    made = graph(lambda h, x, w: loop(step, 1, h, x, w), (2, 4), (T, 2, 3), (3, 4))
    after = Simplify()(Contract()(Simplify()(made)))
    (scan,) = (v for v in after.order() if v.prim == "scan")
    prims = [v.prim for v in scan.params["body"].graph.order()]
    assert "dot" in prims and "full" not in prims and "sum" not in prims
    inputs = numbers(made, 4, 0)
    close(evaluate(after, inputs, sizes(4)), evaluate(made, inputs, sizes(4)))


@given(SEEDS, LENGTHS)
@settings(max_examples=100, deadline=None)
def test_passes_keep_random_loops_and_their_gradients(seed: int, length: int) -> None:
    program = Program(seed)
    if program.is_empty:
        return
    for made in (program.graph(), vjp(program.graph(), range(sum(program.counts)))):
        after = made
        for run in (Simplify(), TidyLoops(), Contract(), Simplify()):
            after = verify(run(after))
        inputs = numbers(made, length, seed)
        close(evaluate(after, inputs, sizes(length)), evaluate(made, inputs, sizes(length)))
        assert np.all([o is None or v is not None for o, v in zip(made.outputs, after.outputs, strict=True)])
