"""Properties that hold for every graph: the adjoint, the transpose of a transpose, and that the transforms commute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transform_samples import Rules, run

from fusegrad.ir import Graph, Value, verify
from fusegrad.ir.rewrite import extract
from fusegrad.ir.transforms.batch import batch
from fusegrad.ir.transforms.linearity import why_not_linear
from fusegrad.ir.transforms.linearize import linearize
from fusegrad.ir.transforms.ops import DIFFERENTIABLE
from fusegrad.ir.transforms.transpose import transpose, vjp

RULES = Rules()
SEEDS = st.integers(0, 10**6)
LANES = 2


def moving(graph: Graph) -> list[int]:
    return [i for i, v in enumerate(graph.inputs) if v.dtype in DIFFERENTIABLE]


def numbers(rng: np.random.Generator, values: Sequence[Value], sizes: dict[Any, int]) -> list[np.ndarray[Any, Any]]:
    def size(n: Any) -> int:
        return n if isinstance(n, int) else int(n.subs(sizes))

    return [rng.normal(size=tuple(map(size, v.shape))) for v in values]


def finite(*groups: Sequence[Any]) -> None:
    """Only graphs without infinities have a meaning to compare."""
    assume(all(np.all(np.isfinite(x)) and np.all(np.abs(x) < 1e50) for g in groups for x in g if x is not None))


def same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    scale = max([1.0, *(float(np.max(np.abs(x))) for x in expected if x is not None and x.size)])
    for a, b in zip(found, expected, strict=True):
        if a is None or b is None:
            assert not np.any(b if a is None else a)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11 * scale)


def pairing(xs: Sequence[Any], ys: Sequence[Any]) -> tuple[float, float]:
    """<x, y>, and what its rounding may be."""
    products = [x * y for x, y in zip(xs, ys, strict=True) if x is not None and y is not None]
    return sum(float(p.sum()) for p in products), sum(float(np.abs(p).sum()) for p in products)


def cancelled(graph: Graph, inputs: Sequence[Any], sizes: dict[Any, int]) -> float:
    """What may be left of values that cancel out: 2**-100 is among the constants, and divides."""
    everything = run(extract(graph.order(), graph.inputs, name="everything"), inputs, sizes)
    finite_ones = [np.abs(x[np.isfinite(x)]) for x in everything if x.dtype == np.float64]
    return 1e-15 * max([0.0, *(float(x.max()) for x in finite_ones if x.size)])


@given(SEEDS, st.integers(1, 5))
@example(531, 1)
@settings(max_examples=120, deadline=None)
def test_vjp_is_the_adjoint_of_jvp(grow, inputs_for, seed: int, m: int) -> None:
    graph = grow(seed, 25)
    sizes = {s: m for v in graph.inputs for n in v.shape if not isinstance(n, int) for s in n.free_symbols}
    wrt, rng = moving(graph), np.random.default_rng(seed)
    inputs = inputs_for(graph, seed, False, sizes)
    pushed, pulled = verify(linearize(graph, wrt, RULES)), verify(vjp(graph, wrt, rules=RULES))
    dots = numbers(rng, [graph.inputs[i] for i in wrt], sizes)
    kept = [i for i, o in enumerate(graph.outputs) if o is not None and o.dtype in DIFFERENTIABLE]
    bars = numbers(rng, [graph.outputs[i] for i in kept], sizes)
    forward = run(pushed, [*inputs, *dots], sizes)
    back = run(pulled, [*inputs, *bars], sizes)
    finite(forward, back, run(graph, inputs, sizes))
    assert all(o is None for i, o in enumerate(pushed.outputs) if i not in kept)
    (a, slack), (b, more) = pairing([forward[i] for i in kept], bars), pairing(dots, back)
    left = cancelled(pushed, [*inputs, *dots], sizes) + cancelled(pulled, [*inputs, *bars], sizes)
    assert abs(a - b) <= 1e-9 * (1 + slack + more) + 100 * left


@given(SEEDS, st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_a_jvp_is_linear_and_its_transpose_transposes_back(grow, inputs_for, seed: int, m: int) -> None:
    graph = grow(seed, 20)
    sizes = {s: m for v in graph.inputs for n in v.shape if not isinstance(n, int) for s in n.free_symbols}
    wrt, count = moving(graph), len(graph.inputs)
    pushed = linearize(graph, wrt, RULES)
    tangents = list(range(count, len(pushed.inputs)))
    assert why_not_linear(pushed, tangents, RULES) is None
    once = transpose(pushed, tangents, RULES)
    twice = verify(transpose(once, range(count, len(once.inputs)), RULES))
    rng = np.random.default_rng(seed)
    inputs = inputs_for(graph, seed, False, sizes)
    dots = numbers(rng, [graph.inputs[i] for i in wrt], sizes)
    expected = run(pushed, [*inputs, *dots], sizes)
    live = [d for d, o in zip(dots, once.outputs, strict=True) if o is not None]
    found = run(twice, [*inputs, *live], sizes)
    finite(expected, found)
    same(found, [e for e in expected if e is not None])


@given(SEEDS, st.lists(st.booleans(), min_size=6, max_size=6))
@settings(max_examples=120, deadline=None)
def test_batch_is_one_lane_at_a_time(grow, inputs_for, seed: int, mapped: list[bool]) -> None:
    graph = grow(seed, 25)
    sizes = {s: 3 for v in graph.inputs for n in v.shape if not isinstance(n, int) for s in n.free_symbols}
    over, lanes_out = batch(graph, mapped, LANES, RULES)
    lanes = [inputs_for(graph, seed + k, True, sizes) for k in range(LANES)]
    given_to = [[x if m else f for x, f, m in zip(lane, lanes[0], mapped, strict=True)] for lane in lanes]
    inputs = [np.stack([g[i] for g in given_to]) if m else given_to[0][i] for i, m in enumerate(mapped)]
    found, each = run(verify(over), inputs, sizes), [run(graph, g, sizes) for g in given_to]
    for i, (value, lanes_there) in enumerate(zip(found, lanes_out, strict=True)):
        expected = np.stack([e[i] for e in each]) if lanes_there else each[0][i]
        np.testing.assert_allclose(value, expected, rtol=1e-12)


@given(SEEDS)
@settings(max_examples=60, deadline=None)
def test_batch_commutes_with_the_derivatives(grow, inputs_for, seed: int) -> None:
    graph = grow(seed, 15)
    sizes = {s: 3 for v in graph.inputs for n in v.shape if not isinstance(n, int) for s in n.free_symbols}
    wrt, every = moving(graph), [True] * len(graph.inputs)
    over = batch(graph, every, LANES, RULES).graph
    lanes = [inputs_for(graph, seed + k, False, sizes) for k in range(LANES)]
    stacked = [np.stack(xs) for xs in zip(*lanes, strict=True)]
    for derive, extra in ((linearize, [over.inputs[i] for i in wrt]), (vjp, None)):
        first, second = derive(over, wrt, rules=RULES), derive(graph, wrt, rules=RULES)
        more = first.inputs[len(every) :] if extra is None else extra
        batched = batch(second, [*every, *[True] * (len(second.inputs) - len(every))], LANES, RULES).graph
        values = [*stacked, *numbers(np.random.default_rng(seed), more, sizes)]
        a, b = run(verify(first), values, sizes), run(verify(batched), values, sizes)
        finite(a, b)
        same(a, b)
