"""Each rule against the evaluator: jvp and differences, vjp and jvp, batch and stacking; and who has rules at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from transform_samples import (
    SIZES,
    B,
    Rules,
    Sample,
    compositions,
    differentiable,
    integer,
    linear,
    no_tangent,
    run,
    samples,
)

from fusegrad.ir import Graph, verify
from fusegrad.ir.prims import PRIMS
from fusegrad.ir.transforms.batch import batch, batch_rules, unmapped
from fusegrad.ir.transforms.linearity import bilinear, why_not_linear
from fusegrad.ir.transforms.linearity import linear as linear_table
from fusegrad.ir.transforms.linearize import constant, jvp_rules, linearize
from fusegrad.ir.transforms.ops import EXTERN
from fusegrad.ir.transforms.transpose import transpose, transpose_rules, vjp

RULES = Rules()
STEP = 1e-6
analytic = [s for s in differentiable if s.name != "call"]
everything = differentiable + no_tangent + integer + linear


def name(sample: Sample) -> str:
    return sample.name


def like(arrays: Sequence[Any], seed: int) -> list[Any]:
    """Random arrays of the same shapes, complex where these are."""
    rng = np.random.default_rng(seed)
    return [
        None if a is None else rng.normal(size=a.shape) + (1j * rng.normal(size=a.shape) if a.dtype.kind == "c" else 0)
        for a in arrays
    ]


def close(found: Any, expected: Any, rtol: float = 1e-9) -> None:
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)


def close_all(found: Sequence[Any], expected: Sequence[Any], rtol: float = 1e-9) -> None:
    """Equal arrays; a structural zero is equal to zeros."""
    for a, b in zip(found, expected, strict=True):
        if a is None or b is None:
            assert not np.any(b if a is None else a)
        else:
            close(a, b, rtol)


def inner(xs: Sequence[Any], ys: Sequence[Any]) -> float:
    """Re<x, conj y>, summed over pairs; None is zero."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None and y is not None]
    return sum(float(np.real(np.sum(x * np.conj(y)))) for x, y in pairs)


# ---------------------------------------------------------------------------------------------- linearize
@pytest.mark.parametrize("sample", analytic, ids=name)
@pytest.mark.parametrize("sizes", SIZES, ids=("some", "small", "tall"))
def test_jvp_is_the_difference_quotient(sample: Sample, sizes: Mapping[Any, int]) -> None:
    graph, inputs = sample.graph(), sample.inputs(sizes)
    for wrt in {sample.floats, *((i,) for i in sample.floats)}:
        moved = verify(linearize(graph, wrt, RULES))
        steps = like([inputs[i] for i in wrt], 1)
        tangents = run(moved, [*inputs, *steps], sizes)
        there, back = ([*inputs], [*inputs])
        for i, t in zip(wrt, steps, strict=True):
            there[i], back[i] = inputs[i] + STEP * t, inputs[i] - STEP * t
        for t, a, b in zip(tangents, run(graph, there, sizes), run(graph, back, sizes), strict=True):
            if a is not None and a.dtype.kind == "f":
                close(0.0 * a if t is None else t, (a - b) / (2 * STEP), 1e-5)
            else:
                assert t is None


@pytest.mark.parametrize("sample", no_tangent + integer, ids=name)
def test_what_is_constant_has_no_tangent(sample: Sample) -> None:
    assert linearize(sample.graph(), sample.floats).outputs == [None]


@pytest.mark.parametrize("sample", differentiable, ids=name)
def test_with_primal_the_outputs_come_first(sample: Sample) -> None:
    graph, sizes = sample.graph(), SIZES[0]
    inputs = sample.inputs(sizes)
    tangents = like([inputs[i] for i in sample.floats], 2)
    both = verify(linearize(graph, sample.floats, RULES, with_primal=True))
    alone = linearize(graph, sample.floats, RULES)
    expected = run(graph, inputs, sizes) + run(alone, [*inputs, *tangents], sizes)
    close_all(run(both, [*inputs, *tangents], sizes), expected)


# ---------------------------------------------------------------------------------------------- transpose
@pytest.mark.parametrize("sample", differentiable, ids=name)
@pytest.mark.parametrize("sizes", SIZES, ids=("some", "small", "tall"))
def test_vjp_is_the_adjoint_of_jvp(sample: Sample, sizes: Mapping[Any, int]) -> None:
    graph, inputs = sample.graph(), sample.inputs(sizes)
    outputs = run(graph, inputs, sizes)
    given = [i for i, o in enumerate(outputs) if o is not None and o.dtype.kind == "f"]
    for wrt in [sample.floats, *((i,) for i in sample.floats)]:
        pulled = verify(vjp(graph, wrt, given, RULES))
        bars, dots = like([outputs[i] for i in given], 3), like([inputs[i] for i in wrt], 4)
        pushed = run(linearize(graph, wrt, RULES), [*inputs, *dots], sizes)
        back = run(pulled, [*inputs, *bars], sizes)
        if sample.name != "call" or wrt == (0,):  # its own rules give nothing to the second operand
            close(inner([pushed[i] for i in given], bars), inner(dots, back))


@pytest.mark.parametrize("sample", linear, ids=name)
@pytest.mark.parametrize("sizes", SIZES, ids=("some", "small", "tall"))
def test_transpose_is_the_adjoint(sample: Sample, sizes: Mapping[Any, int]) -> None:
    graph, inputs = sample.graph(), sample.inputs(sizes)
    rest = [x for i, x in enumerate(inputs) if i not in sample.linear_in]
    outputs = run(graph, inputs, sizes)
    bars = like(outputs, 5)
    pulled = verify(transpose(graph, sample.linear_in, RULES))
    back = run(pulled, [*rest, *bars], sizes)
    close(inner(outputs, bars), inner([inputs[i] for i in sample.linear_in], back))


@pytest.mark.parametrize("sample", [s for s in linear if "aten" not in s.name], ids=name)
def test_transposed_twice_is_the_graph(sample: Sample) -> None:
    graph, sizes = sample.graph(), SIZES[0]
    inputs = sample.inputs(sizes)
    rest = [x for i, x in enumerate(inputs) if i not in sample.linear_in]
    once = transpose(graph, sample.linear_in)
    back = [i for i in range(len(rest), len(once.inputs))]
    twice = verify(transpose(once, back))
    expected = run(graph, inputs, sizes)
    live = [inputs[i] for i, o in zip(sample.linear_in, once.outputs, strict=True) if o is not None]
    close_all(run(twice, [*rest, *live], sizes), [e for e in expected if e is not None])


# ---------------------------------------------------------------------------------------------- batch
def lanes_of(sample: Sample, mapped: Sequence[bool], sizes: Mapping[Any, int]) -> tuple[list[Any], list[list[Any]]]:
    """Inputs for the batched graph, and for the graph once per lane."""
    per_lane = [sample.inputs(sizes, seed) for seed in range(sizes[B])]
    first = per_lane[0]
    lanes = [[x if m else f for x, f, m in zip(lane, first, mapped, strict=True)] for lane in per_lane]
    return [np.stack([lane[i] for lane in lanes]) if m else first[i] for i, m in enumerate(mapped)], lanes


def mappings(count: int) -> list[tuple[bool, ...]]:
    return [m for m in product((True, False), repeat=count) if any(m)]


def check_batch(graph: Graph, sample: Sample, sizes: Mapping[Any, int]) -> None:
    for mapped in mappings(len(sample.types)):
        over, lanes_out = batch(graph, mapped, B, RULES)
        inputs, lanes = lanes_of(sample, mapped, sizes)
        found = run(verify(over), inputs, sizes)
        each = [run(graph, lane, sizes) for lane in lanes]
        for i, (value, has_lanes) in enumerate(zip(found, lanes_out, strict=True)):
            if value is None:
                assert each[0][i] is None and not has_lanes
            else:
                close(value, np.stack([e[i] for e in each]) if has_lanes else each[0][i])


@pytest.mark.parametrize("sample", everything, ids=name)
@pytest.mark.parametrize("sizes", SIZES, ids=("some", "small", "tall"))
def test_batch_is_one_lane_at_a_time(sample: Sample, sizes: Mapping[Any, int]) -> None:
    check_batch(sample.graph(), sample, sizes)


def test_what_depends_on_nothing_mapped_is_computed_once() -> None:
    sample = next(s for s in samples if s.name == "mul")
    graph = sample.graph()
    x, y = graph.inputs
    graph.returning([graph.emit("sin", (y,), {}), graph.emit("mul", (x, y), {})])
    over, mapped = batch(graph, (True, False), B)
    assert mapped == (False, True)
    assert over.outputs[0].shape == y.shape and over.outputs[1].shape == (B, *x.shape)


# ---------------------------------------------------------------------------------------------- compositions
@pytest.mark.parametrize("sample", analytic, ids=name)
def test_batch_commutes_with_linearize(sample: Sample) -> None:
    graph, sizes, wrt = sample.graph(), SIZES[0], sample.floats
    mapped = [True] * len(sample.types)
    inputs, _ = lanes_of(sample, mapped, sizes)
    tangents = like([inputs[i] for i in wrt], 6)
    first = batch(linearize(graph, wrt, RULES), mapped + [True] * len(wrt), B, RULES)
    second = linearize(batch(graph, mapped, B, RULES).graph, wrt, RULES)
    close_all(*(run(verify(g), [*inputs, *tangents], sizes) for g in (first.graph, second)))


@pytest.mark.parametrize("sample", [s for s in linear if "aten" not in s.name], ids=name)
def test_batch_commutes_with_transpose(sample: Sample) -> None:
    graph, sizes = sample.graph(), SIZES[0]
    mapped = [True] * len(sample.types)
    inputs, _ = lanes_of(sample, mapped, sizes)
    rest = [x for i, x in enumerate(inputs) if i not in sample.linear_in]
    over = batch(graph, mapped, B).graph
    bars = like([o for o in run(over, inputs, sizes) if o is not None], 7)
    first = transpose(over, sample.linear_in)
    second = batch(transpose(graph, sample.linear_in), [True] * (len(rest) + len(bars)), B).graph
    close_all(*(run(verify(g), [*rest, *bars], sizes) for g in (first, second)))


@pytest.mark.parametrize("sample", [s for s in analytic if s.name != "lgamma"], ids=name)
def test_second_order_is_the_difference_quotient_of_the_first(sample: Sample) -> None:
    """Forward over reverse, and reverse over reverse by symmetry of its pairing."""
    graph, sizes, wrt = sample.graph(), SIZES[0], sample.floats
    inputs = sample.inputs(sizes)
    outputs = run(graph, inputs, sizes)
    given = [i for i, o in enumerate(outputs) if o is not None and o.dtype.kind == "f"]
    bars, dots = like([outputs[i] for i in given], 8), like([inputs[i] for i in wrt], 9)
    first = vjp(graph, wrt, given, RULES)
    pushed = run(verify(linearize(first, wrt, RULES)), [*inputs, *bars, *dots], sizes)
    there, back = [*inputs], [*inputs]
    for i, t in zip(wrt, dots, strict=True):
        there[i], back[i] = inputs[i] + STEP * t, inputs[i] - STEP * t
    pairs = zip(run(first, [*there, *bars], sizes), run(first, [*back, *bars], sizes), strict=True)
    close_all(pushed, [None if a is None else (a - b) / (2 * STEP) for a, b in pairs], 1e-4)
    live = [i for i, o in enumerate(first.outputs) if o is not None]
    again = like([inputs[wrt[i]] for i in live], 10)
    pulled = run(verify(vjp(first, wrt, live, RULES)), [*inputs, *bars, *again], sizes)
    close(inner(dots, pulled), inner(again, [pushed[i] for i in live]), 1e-7)


# ---------------------------------------------------------------------------------------------- the tables
def test_every_primitive_has_a_line_in_each_table() -> None:
    structural = {*EXTERN, "pick", "input", "scan"}
    assert set(PRIMS) == {*batch_rules, *unmapped, *structural}
    assert not set(batch_rules) & {*unmapped, *structural}
    assert set(PRIMS) == {*jvp_rules, *constant, *structural}
    assert not set(jvp_rules) & set(constant)
    assert set(transpose_rules) == {*linear_table, *bilinear} <= set(PRIMS)
    assert all(constant.values())


def test_every_primitive_with_a_rule_has_a_sample() -> None:
    seen = {v.prim for s in everything + compositions for v in s.graph()}
    assert set(PRIMS) - seen <= {"random", "aten_effect"}  # their tests are in test_externs


def test_a_graph_is_linear_where_its_sample_says_so() -> None:
    for sample in linear:
        assert why_not_linear(sample.graph(), sample.linear_in, RULES) is None, sample.name
