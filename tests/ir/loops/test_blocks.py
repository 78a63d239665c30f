"""Loops by blocks: the same loop; and what a transposed loop keeps of what is carried, by bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_samples import T, f64
from test_random_loops import SEEDS, Program, close, numbers, sizes

from fusegrad.ir import Graph, building, emit, verify
from fusegrad.ir.evaluate import evaluate
from fusegrad.ir.loops import separate as separation
from fusegrad.ir.loops.around.cut import cheapest
from fusegrad.ir.loops.blocks import in_blocks
from fusegrad.ir.loops.body import Body
from fusegrad.ir.loops.loop import Loop, loop_of, rebuild_scans, results_of
from fusegrad.ir.loops.unroll import unroll
from fusegrad.ir.transforms.transpose import vjp

D = 16


def by_blocks(graph: Graph, steps: int) -> Graph:
    return rebuild_scans(graph, lambda node, args: in_blocks(loop_of(node, args), steps, Loop.emit, Loop.emit))


@given(SEEDS, st.sampled_from([0, 1, 3, 4, 7, 8]), st.sampled_from([1, 2, 4]))
@settings(max_examples=100, deadline=None)
def test_blocks_and_a_rest_are_the_loop(seed: int, length: int, steps: int) -> None:
    program = Program(seed)
    if program.is_empty:
        return
    graph = program.graph()
    inputs = numbers(graph, length, seed)
    close(evaluate(verify(by_blocks(graph, steps)), inputs, sizes(length)), program.numpy(inputs, length))


def test_a_number_of_steps_that_is_known_is_divided_in_numbers() -> None:
    graph = unroll(by_blocks(Program(3).graph(), 4), {})
    assert {str(v.params["length"]) for v in graph.order() if v.prim == "scan"} == {"floor(T/4)", "T - 4*floor(T/4)"}


# ---------------------------------------------------------------------------------------------- what is kept
def state(reads: bool) -> Graph:
    """s = tanh(s * a[t] + k[t] v[t]); y[t] = s q[t]: the carry is larger than what a step reads, or as large."""
    body, graph = Graph("step"), Graph("state")
    types = [f64(D, D), f64(D), f64(D), f64(D, D) if reads else f64(D)]
    s, k, v, a = (body.input(t, n) for t, n in zip(types, "skva", strict=True))
    with building(body):
        outer = emit("mul", *(emit("broadcast", x, shape=(D, D), axes=(i,)) for i, x in enumerate((k, v))))
        decay = a if reads else emit("broadcast", a, shape=(D, D), axes=(0,))
        new = emit("tanh", emit("add", emit("mul", s, decay), outer))
        body.returning([new, emit("sum", emit("mul", new, outer), axes=(1,))])
    operands = [graph.input(types[0], "s0")]
    operands += [graph.input(t.with_shape((T, *t.shape)), n) for t, n in zip(types[1:], "kva", strict=True)]
    with building(graph):
        params = {"body": Body(body), "carries": 1, "steps": 3, "length": T, "reverse": False}
        return graph.returning(results_of(emit("scan", *operands, **params)))


def stacks(graph: Graph) -> list[tuple[Any, ...]]:
    """The shapes of what loops hand over for all steps, other than the results of the whole."""
    picks = [v for v in graph.order() if v.prim == "pick" and v not in graph.outputs]
    return [v.shape for v in picks if v.params["index"] >= v.args[0].params["carries"]]


def test_what_is_as_large_as_the_steps_is_stacked() -> None:
    pulled = verify(vjp(state(reads=True), range(4)))
    assert sum(v.prim == "scan" for v in pulled.order()) == 2
    assert [s for s in stacks(pulled) if len(s) == 3] == [(T, D, D)]


def test_what_is_larger_is_kept_every_so_many_steps() -> None:
    pulled = verify(vjp(state(reads=False), range(4)))
    assert not [s for s in stacks(pulled) if s[0] == T and len(s) == 3]
    blocks = [v for v in pulled.order() if v.prim == "scan" and str(v.params["length"]) == "floor(T/64)"]
    assert len(blocks) == 2  # one that keeps what is carried into each block, and one that runs each block again
    kept = [s for s in stacks(pulled) if s[1:] == (D, D)]
    assert str(kept[0][0]) == "floor(T/64)" and all(str(s[0]) in ("floor(T/64)", "T - 64*floor(T/64)") for s in kept)


def test_a_loop_in_a_step_is_cut_at_its_results() -> None:
    body = Graph("step")
    operands = [body.input(x.aval, f"x{i}") for i, x in enumerate(state(reads=True).inputs)]
    with building(body):
        inner = Body(state(reads=True).order()[-1].args[0].params["body"].graph)
        last, steps = results_of(emit("scan", *operands, body=inner, carries=1, steps=3, length=T, reverse=False))
        body.returning([emit("broadcast", last, shape=(D, D, D), axes=(0, 1)), steps])
    assert cheapest(body, body.results[:1], lambda v: v.ndim, ()) == [last]


@pytest.mark.parametrize("length", [0, 1, 66])
def test_either_way_the_gradients_are_those_of_the_steps(length: int) -> None:
    graph = state(reads=False)
    rng = np.random.default_rng(length)
    inputs = [rng.normal(size=[length if n == T else n for n in v.shape]) * 0.5 for v in graph.inputs]
    bars = [rng.normal(size=o.shape) for o in evaluate(graph, inputs, sizes(length))]
    pulled = evaluate(vjp(graph, range(4)), [*inputs, *bars], sizes(length))
    expected = evaluate(vjp(unroll(graph, sizes(length)), range(4)), [*inputs, *bars], {})
    close(pulled, expected)


@given(SEEDS, st.sampled_from([0, 1, 5, 9]))
@settings(max_examples=60, deadline=None)
def test_gradients_by_blocks_of_random_loops(seed: int, length: int) -> None:
    program = Program(seed)
    if program.is_empty:
        return
    graph = program.graph()
    before, typical = separation.MOST_KEPT, separation.estimate
    separation.MOST_KEPT = -1  # everything is too much
    separation.estimate = lambda size, hints=None: typical(size, hints or {T: 9})  # type: ignore[assignment]
    try:
        pulled = verify(vjp(graph, range(len(graph.inputs))))
    finally:
        separation.MOST_KEPT, separation.estimate = before, typical
    inputs = numbers(graph, length, seed)
    rng = np.random.default_rng(seed)
    bars = [rng.normal(size=o.shape) for o in evaluate(graph, inputs, sizes(length))]
    expected = evaluate(vjp(unroll(graph, sizes(length)), range(len(inputs))), [*inputs, *bars], {})
    close(evaluate(pulled, [*inputs, *bars], sizes(length)), expected)


