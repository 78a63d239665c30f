"""Random bodies: the scan beside the unrolled graph beside numpy; its derivatives and batch beside those unrolled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_samples import Array, T, f64

from fusegrad.ir import Graph, Value, building, emit, parse, show, verify
from fusegrad.ir.evaluate import evaluate
from fusegrad.ir.loops.body import Body
from fusegrad.ir.loops.loop import results_of
from fusegrad.ir.loops.prune import prune_scans
from fusegrad.ir.loops.unroll import unroll
from fusegrad.ir.transforms.batch import batch
from fusegrad.ir.transforms.linearity import why_not_linear
from fusegrad.ir.transforms.linearize import linearize
from fusegrad.ir.transforms.transpose import transpose, vjp

ROWS, WIDTH, LANES = 2, 3, 2
SHAPE = (ROWS, WIDTH)
SEEDS = st.integers(0, 10**9)
LENGTHS = st.sampled_from([0, 1, 2, 7])


def over_rows(x: Value) -> Value:
    return emit("broadcast", x, shape=SHAPE, axes=(0,))


def product(x: Value, w: Value) -> Value:
    square = emit("dot", x, w, x_axes=(0, 1), y_axes=(2, 1), out_axes=(0, 2))
    return emit("dot", square, w, x_axes=(0, 2), y_axes=(2, 1), out_axes=(0, 1))


def stack_of(x: Value) -> Value:
    return emit("cumsum", x, axis=1, reverse=False)


OPS: list[tuple[int, Callable[..., Value], Callable[..., Array]]] = [
    (1, lambda x: emit("sin", x), np.sin),
    (1, lambda x: emit("tanh", x), np.tanh),
    (1, lambda x: emit("neg", x), np.negative),
    (1, lambda x: emit("sigmoid", x), lambda x: 1 / (1 + np.exp(-x))),
    (2, lambda x, y: emit("add", x, y), np.add),
    (2, lambda x, y: emit("mul", x, y), np.multiply),
    (2, lambda x, y: emit("sub", x, y), np.subtract),
    (3, lambda c, x, y: emit("where", emit("gt", c, x), x, y), lambda c, x, y: np.where(c > x, x, y)),
    (1, lambda x: over_rows(emit("sum", emit("sin", x), axes=(1,))),
     lambda x: np.broadcast_to(np.sin(x).sum(1, keepdims=True), SHAPE)),
    (1, lambda x: over_rows(emit("amax", x, axes=(1,))), lambda x: np.broadcast_to(x.max(1, keepdims=True), SHAPE)),
    (2, lambda x, y: emit("tanh", product(x, y)), lambda x, y: np.tanh(x @ y.T @ y)),
    (1, lambda x: emit("flip", x, axes=(1,)), lambda x: x[:, ::-1]),
    (1, stack_of, lambda x: x.cumsum(1)),
]  # fmt: skip


class Program:
    """A random loop: instructions over carries, xs and wholes, and which of the values are its results."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.counts = tuple(int(n) for n in (rng.integers(0, 3), rng.integers(0, 3), rng.integers(0, 2)))
        values = sum(self.counts)
        self.instructions: list[tuple[int, tuple[int, ...]]] = []
        if values:
            for _ in range(rng.integers(1, 9)):
                op = int(rng.integers(len(OPS)))
                self.instructions.append((op, tuple(int(i) for i in rng.integers(0, values, OPS[op][0]))))
                values += 1
        self.reverse = bool(rng.integers(2))
        ys = int(rng.integers(0 if self.counts[0] else 1, 3))
        self.results = [int(i) for i in rng.integers(0, max(values, 1), self.counts[0] + ys)]

    @property
    def is_empty(self) -> bool:
        return not sum(self.counts)

    def step(self, inputs: Sequence[Any], kind: int) -> list[Any]:
        """The results of a step, of values (kind 1) or arrays (kind 2)."""
        values = list(inputs)
        for op, operands in self.instructions:
            values.append(OPS[op][kind](*(values[i] for i in operands)))
        return [values[i] for i in self.results]

    def graph(self) -> Graph:
        carries, steps, _ = self.counts
        body, graph = Graph("step"), Graph("loop")
        inside = [body.input(f64(*SHAPE), f"s{i}") for i in range(sum(self.counts))]
        with building(body):
            body.returning(self.step(inside, 1))
        shapes = [(T, *SHAPE) if carries <= i < carries + steps else SHAPE for i in range(sum(self.counts))]
        operands = [graph.input(f64(*s), f"x{i}") for i, s in enumerate(shapes)]
        params = {"carries": carries, "steps": steps, "length": T, "reverse": self.reverse}
        with building(graph):
            return graph.returning(results_of(emit("scan", *operands, body=Body(body), **params)))

    def numpy(self, operands: Sequence[Array], length: int) -> list[Array]:
        count, steps, _ = self.counts
        carries, xs, wholes = operands[:count], operands[count : count + steps], operands[count + steps :]
        ys = [np.zeros((length, *SHAPE)) for _ in self.results[count:]]
        for t in range(length)[:: -1 if self.reverse else 1]:
            found = self.step([*carries, *(x[t] for x in xs), *wholes], 2)
            carries = found[:count]
            for whole, part in zip(ys, found[count:], strict=True):
                whole[t] = part
        return [*carries, *ys]


def numbers(graph: Graph, length: int, seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=[length if n == T else n for n in v.shape]) for v in graph.inputs]


def close(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """None is zero."""
    for a, b in zip(found, expected, strict=True):
        zero = 0.0 if a is None and b is None else 0 * (b if a is None else a)
        np.testing.assert_allclose(zero if a is None else a, zero if b is None else b, rtol=1e-8, atol=1e-9)


def sizes(length: int) -> dict[sympy.Symbol, int]:
    return {T: length}


@given(SEEDS, LENGTHS)
@settings(max_examples=300, deadline=None)
def test_a_scan_is_its_steps(seed: int, length: int) -> None:
    program = Program(seed)
    if program.is_empty:
        return
    graph = verify(program.graph())
    inputs = numbers(graph, length, seed)
    expected = program.numpy(inputs, length)
    close(evaluate(graph, inputs, sizes(length)), expected)
    close(evaluate(verify(parse(show(graph))), inputs, sizes(length)), expected)
    steps = verify(unroll(graph, sizes(length)))
    assert all(v.prim != "scan" for v in steps)
    close(evaluate(steps, inputs, {}), expected)


@given(SEEDS, LENGTHS)
@settings(max_examples=150, deadline=None)
def test_derivatives_are_those_of_the_steps(seed: int, length: int) -> None:
    program = Program(seed)
    if program.is_empty:
        return
    graph, rng = program.graph(), np.random.default_rng(seed)
    steps, inputs = unroll(graph, sizes(length)), numbers(program.graph(), length, seed)
    wrt = sorted({int(i) for i in rng.integers(0, len(inputs), 2)})
    dots = [rng.normal(size=inputs[i].shape) for i in wrt]
    pushed = verify(linearize(graph, wrt))
    close(evaluate(pushed, [*inputs, *dots], sizes(length)), evaluate(linearize(steps, wrt), [*inputs, *dots], {}))
    bars = [rng.normal(size=o.shape) for o in evaluate(graph, inputs, sizes(length))]
    pulled = verify(vjp(graph, wrt))
    close(evaluate(pulled, [*inputs, *bars], sizes(length)), evaluate(vjp(steps, wrt), [*inputs, *bars], {}))


@given(SEEDS, st.sampled_from([1, 3]))
@settings(max_examples=40, deadline=None)
def test_second_derivatives_are_those_of_the_steps(seed: int, length: int) -> None:
    """Reverse over reverse, and forward over reverse."""
    program = Program(seed)
    if program.is_empty:
        return
    graph, rng = program.graph(), np.random.default_rng(seed)
    wrt = [int(rng.integers(len(graph.inputs)))]
    first, first_steps = vjp(graph, wrt), vjp(unroll(graph, sizes(length)), wrt)
    if first.outputs == [None] or first_steps.outputs == [None]:
        return
    inputs = numbers(first, length, seed)
    dot = [rng.normal(size=inputs[wrt[0]].shape)]
    pushed, pulled = verify(linearize(first, wrt)), verify(vjp(first, wrt))
    expected = [transform(first_steps, wrt) for transform in (linearize, vjp)]
    for found, steps in zip((pushed, pulled), expected, strict=True):
        close(evaluate(found, [*inputs, *dot], sizes(length)), evaluate(steps, [*inputs, *dot], {}))


@given(SEEDS, LENGTHS)
@settings(max_examples=100, deadline=None)
def test_transposes_of_tangents_transpose_back(seed: int, length: int) -> None:
    program = Program(seed)
    if program.is_empty:
        return
    graph = program.graph()
    pushed = linearize(graph, range(len(graph.inputs)))
    tangents = list(range(len(graph.inputs), len(pushed.inputs)))
    assert why_not_linear(pushed, tangents) is None
    if all(o is None for o in pushed.outputs):
        return
    once = transpose(pushed, tangents)
    twice = verify(transpose(once, range(len(graph.inputs), len(once.inputs))))
    inputs = numbers(pushed, length, seed)
    live = [x for x, o in zip(inputs[len(graph.inputs) :], once.outputs, strict=True) if o is not None]
    there = [o for o in evaluate(pushed, inputs, sizes(length)) if o is not None]
    close(evaluate(twice, [*inputs[: len(graph.inputs)], *live], sizes(length)), there)


@given(SEEDS, LENGTHS, st.lists(st.booleans(), min_size=6, max_size=6))
@settings(max_examples=150, deadline=None)
def test_a_batch_is_one_lane_at_a_time(seed: int, length: int, mapped: list[bool]) -> None:
    program = Program(seed)
    if program.is_empty:
        return
    graph = program.graph()
    flags = mapped[: len(graph.inputs)]
    over, given_out = batch(graph, flags, LANES)
    lanes = [numbers(graph, length, seed + k) for k in range(LANES)]
    each = [[x if m else f for x, f, m in zip(lane, lanes[0], flags, strict=True)] for lane in lanes]
    inputs = [np.stack([e[i] for e in each]) if m else lanes[0][i] for i, m in enumerate(flags)]
    found = evaluate(verify(over), inputs, sizes(length))
    alone = [evaluate(graph, e, sizes(length)) for e in each]
    close(found, [np.stack([a[i] for a in alone]) if m else alone[0][i] for i, m in enumerate(given_out)])


@given(SEEDS, LENGTHS)
@settings(max_examples=100, deadline=None)
def test_what_is_not_read_is_not_computed(seed: int, length: int) -> None:
    program = Program(seed)
    if program.is_empty:
        return
    graph = program.graph()
    kept = int(np.random.default_rng(seed).integers(len(graph.outputs)))
    graph.returning([graph.outputs[kept]])
    small = verify(prune_scans(graph))
    inputs = numbers(graph, length, seed)
    close(evaluate(small, inputs, sizes(length)), evaluate(graph, inputs, sizes(length)))
    assert all(len(v.avals) <= len(program.counts) + 1 for v in small if v.prim == "scan")
