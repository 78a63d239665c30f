"""Kernels of loops over time: step by step, many steps at once, with matrices and neighbours, beside the evaluator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from harness import INTERPRET, Input, T, full, graph_of, inputs_of, op, run, symbol, where

from fusegrad.codegen import TARGETS, Kernels, Target, generate, module
from fusegrad.codegen.proofs import prove
from fusegrad.ir import Graph, TensorType, building, emit, verify
from fusegrad.ir.evaluate import evaluate
from fusegrad.ir.loops.body import Body
from fusegrad.runtime.kernels.cross_compile.pool import compile_for

TIME, B, D, H = symbol("s0"), symbol("s1"), symbol("s2"), symbol("s3")
STATES = 4
BY_STEP = INTERPRET
AT_ONCE = replace(INTERPRET, units=1 << 20)
"""A device with more units than elements: many steps at once."""
Types = Mapping[str, tuple[str, tuple[Any, ...]]]


@dataclass(frozen=True)
class Loop:
    """A scan: types of what it carries, of one step of each x, of the wholes; and what a step makes of these."""

    carries: Types
    xs: Types
    wholes: Types
    step: Callable[..., Sequence[T]]
    reverse: bool = False
    backwards: bool = False  # xs are read from the last to the first, by a flip
    by_batch: bool = False  # in memory [batch, time, ..]

    def inputs(self) -> dict[str, Input]:
        own = {n: Input(d, s) for types in (self.carries, self.wholes) for n, (d, s) in types.items()}
        return own | {n: Input(d, self._in_memory(s)) for n, (d, s) in self.xs.items()}

    def _in_memory(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return (shape[0], TIME, *shape[1:]) if self.by_batch else (TIME, *shape)

    def graph(self) -> Graph:
        return graph_of(lambda *given: self.results(dict(zip(self.inputs(), given, strict=True))), **self.inputs())

    def results(self, given: dict[str, T]) -> list[T]:
        xs = [self._steps_first(given[n]) for n in self.xs]
        operands = [*(given[n] for n in self.carries), *xs, *(given[n] for n in self.wholes)]
        counts = {"carries": len(self.carries), "steps": len(xs), "length": TIME, "reverse": self.reverse}
        node = emit("scan", *(o.v for o in operands), body=self.body(), **counts)
        several = len(node.avals) > 1
        results = [T(emit("pick", node, index=i)) for i in range(len(node.avals))] if several else [T(node)]
        stacked = [y.permute(1, 0, *range(2, y.v.ndim)) if self.by_batch else y for y in results[len(self.carries) :]]
        return [*results[: len(self.carries)], *stacked]

    def _steps_first(self, x: T) -> T:
        x = x.permute(1, 0, *range(2, x.v.ndim)) if self.by_batch else x
        return T(emit("flip", x.v, axes=(0,))) if self.backwards else x

    def body(self) -> Body:
        graph = Graph("step")
        with building(graph):
            types = {**self.carries, **self.xs, **self.wholes}
            given = [T(graph.input(TensorType(shape, dtype), name)) for name, (dtype, shape) in types.items()]
            results = self.step(*given)
        return Body(verify(graph.returning([r.v for r in results])))


def dot(x: T, w: T) -> T:
    """x @ w.T"""
    return T(emit("dot", x.v, w.v, x_axes=(0, 1), y_axes=(2, 1), out_axes=(0, 2)))


def gated(h: T, a: T, x: T) -> Sequence[T]:
    return [a * h + x] * 2


def derivative(c: T, a: T, g: T, h: T) -> Sequence[T]:
    """The backward of `gated`: what is carried is read before the step."""
    dh = c + g
    return dh * a, dh, dh * h


def swapped(a: T, b: T, x: T) -> Sequence[T]:
    return b, a + x, a * b


def selective(h: T, dt: T, u: T, b: T, c: T, a: T) -> Sequence[T]:
    decay = (dt.reshape(B, D, 1) * a.reshape(1, D, STATES)).sigmoid()
    h = h * decay + (dt * u).reshape(B, D, 1) * b.reshape(B, 1, STATES)
    return h, (h * c.reshape(B, 1, STATES)).sum(2)


def spiking(v: T, x: T) -> Sequence[T]:
    v = v * 0.9 + x
    spike = (v >= full(1.0, v.shape, v.dtype)).to(v.dtype)
    return v * (1.0 - spike), spike


def recurrent(h: T, x: T, w: T) -> Sequence[T]:
    return [(dot(h, w) + x).tanh()] * 2


def gru(h: T, x: T, wr: T, wn: T) -> Sequence[T]:
    r = (dot(h, wr) + x).sigmoid()
    n = (dot(r * h, wn) + x).tanh()
    return [h * r + n * (1.0 - r)] * 2


def neighbours(a: T, x: T) -> Sequence[T]:
    """a[s] and a[s - 1], as in the forward pass of CTC."""
    before = T(emit("slice", a.v, start=(0, 0), stop=(B, D - 1), step=(1, 1)))
    before = T(emit("pad", before.v, lo=(0, 1), hi=(0, 0), inner=(0, 0)))
    return [op("max", a, before) + x] * 2


def reset_maximum(m: T, x: T, r: T) -> Sequence[T]:
    return [where(r > 0.0, x, op("max", m, x))] * 2


def normalised(m: T) -> Sequence[T]:
    """One step of Sinkhorn's."""
    m = m / m.sum(1, keep=True)
    return [m / m.sum(0, keep=True)]


def of(dtype: str, shape: tuple[Any, ...], *names: str) -> Types:
    return dict.fromkeys(names, (dtype, shape))


def on_rows(step: Callable[..., Sequence[T]], carries: str, xs: str, dtype: str = "f32", **options: Any) -> Loop:
    return Loop(of(dtype, (B, D), *carries.split()), of(dtype, (B, D), *xs.split()), {}, step, **options)


def loops(dtype: str = "f32") -> dict[str, Loop]:
    return {
        "gated": on_rows(gated, "h", "a x", dtype),
        "gated, reversed": on_rows(gated, "h", "a x", dtype, reverse=True),
        "gated, flipped, batch first": on_rows(gated, "h", "a x", dtype, backwards=True, by_batch=True),
        "derivative": on_rows(derivative, "c", "a g h", dtype, reverse=True),
        "swapped": on_rows(swapped, "a b", "x", dtype),
        "sum": on_rows(lambda h, x: [h + x] * 2, "h", "x", dtype),
        "spiking": on_rows(spiking, "v", "x", dtype),
        "reset maximum": on_rows(reset_maximum, "m", "x r", dtype),
        "neighbours": on_rows(neighbours, "a", "x", dtype),
        "mirrored": on_rows(lambda h, x: [T(emit("flip", h.v, axes=(1,))) * 0.5 + x] * 2, "h", "x", dtype),
        "of numbers": Loop(of(dtype, (), "h"), of(dtype, (), "a", "x"), {}, gated),
        "selective": Loop(
            of(dtype, (B, D, STATES), "h"),
            {**of(dtype, (B, D), "dt", "u"), **of(dtype, (B, STATES), "b", "c")},
            of(dtype, (D, STATES), "a"),
            selective,
        ),
        "recurrent": Loop(of(dtype, (B, H), "h"), of(dtype, (B, H), "x"), of(dtype, (H, H), "w"), recurrent),
        "gru": Loop(of(dtype, (B, H), "h"), of(dtype, (B, H), "x"), of(dtype, (H, H), "wr", "wn"), gru),
    }


CASES = loops()
LINEAR = ("gated", "gated, reversed", "gated, flipped, batch first", "derivative", "sum", "of numbers", "selective")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def agrees(loop: Loop, sizes: Mapping[sympy.Symbol, int], target: Target, kernels: int = 1) -> Kernels:
    """The kernels' results are the evaluator's, and every access in them is proved."""
    graph = loop.graph()
    made = generate(graph, target=target, hints=sizes, name="loop")
    assert len(made.kernels) == kernels
    assert all(p.proved for p in prove(graph, made)), [str(f) for p in prove(graph, made) for f in p.faults]
    given = [v * 0.3 for v in inputs_of(graph, sizes)]
    found = run(made, module(made.kernels), graph, given, sizes)
    wanted = evaluate(graph, [v.double().numpy() for v in given], sizes)
    for x, y in zip(found, wanted, strict=True):
        assert y is not None
        scale = max(1.0, float(np.abs(y).max())) if y.size else 1.0
        np.testing.assert_allclose(x.double().numpy(), y, rtol=0, atol=TOLERANCE[x.dtype] * scale)
    return made


SMALL = {B: 3, D: 21, H: 20}


@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("name", CASES)
def test_step_by_step(name: str, steps: int) -> None:
    made = agrees(CASES[name], {TIME: steps, **SMALL}, BY_STEP)
    assert "associative_scan" not in made.kernels[0].source


@pytest.mark.parametrize("steps", [17, 64, 131])
@pytest.mark.parametrize("name", LINEAR)
def test_many_steps_at_once(name: str, steps: int) -> None:
    made = agrees(CASES[name], {TIME: steps, B: 2, D: 3, H: 4}, AT_ONCE)
    assert "tl.associative_scan" in made.kernels[0].source or "tl.cumsum" in made.kernels[0].source


@pytest.mark.parametrize("name", [n for n in CASES if n not in LINEAR])
def test_what_is_no_recurrence_goes_step_by_step(name: str) -> None:
    made = agrees(CASES[name], {TIME: 19, B: 2, D: 3, H: 4}, AT_ONCE)
    assert "tl.associative_scan" not in made.kernels[0].source


@pytest.mark.parametrize("name", CASES)
def test_no_step(name: str) -> None:
    """What is carried is what it was at first."""
    agrees(CASES[name], {TIME: 0, **SMALL}, BY_STEP)


@pytest.mark.parametrize("name", ["gated", "derivative", "swapped", "selective", "recurrent"])
def test_bfloat16(name: str) -> None:
    agrees(loops("bf16")[name], {TIME: 4, B: 3, D: 8, H: 16}, BY_STEP)


@pytest.mark.parametrize("factor", [1e12, float("inf"), float("nan"), 0.0])
def test_factors_whose_product_is_no_number(factor: float) -> None:
    """1e12 ** 64 is none, and times zero it is zero: then the tile is walked by step."""
    loop, sizes = CASES["gated"], {TIME: 70, B: 1, D: 2}
    graph = loop.graph()
    made = generate(graph, target=AT_ONCE, hints=sizes, name="loop")
    a, x = torch.full((70, 1, 2), 0.5), torch.zeros(70, 1, 2)
    a[3:40] = factor
    x[66:] = 1.0
    found = run(made, module(made.kernels), graph, [torch.zeros(1, 2), a, x], sizes)
    h = torch.zeros(1, 2)
    for t in range(70):
        h = a[t] * h + x[t]
        torch.testing.assert_close(found[1][t], h, equal_nan=True)
    torch.testing.assert_close(found[0], h, equal_nan=True)


def test_two_loops_in_one_kernel() -> None:
    """The second reads the first step by step, in the same direction."""

    def twice(h: T, a: T, x: T) -> list[T]:
        loop = CASES["gated"]
        first = loop.results({"h": h, "a": a, "x": x})
        return loop.results({"h": h, "a": a, "x": first[1]})

    graph = graph_of(twice, **CASES["gated"].inputs())
    sizes = {TIME: 6, **SMALL}
    made = generate(graph, target=BY_STEP, hints=sizes, name="loop")
    assert len(made.kernels) == 1
    given = inputs_of(graph, sizes)
    found = run(made, module(made.kernels), graph, given, sizes)
    wanted = evaluate(graph, [v.double().numpy() for v in given], sizes)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
@pytest.mark.parametrize("name", ["gated", "derivative", "selective", "recurrent", "neighbours"])
def test_compiles_without_spills(name: str, target: str) -> None:
    loop, sizes = CASES[name], {TIME: 512, B: 8, D: 64, H: 64}
    made = generate(loop.graph(), target=TARGETS[target], hints=sizes, name="loop")
    binaries = compile_for(made.kernels, module(made.kernels), [target])
    for kernel in made.kernels:
        binary = binaries[kernel.name][target]
        assert binary.error is None
        assert binary.spills in (0, -1)
