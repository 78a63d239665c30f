"""Loops over time as graphs: types of what is carried, read and given, and the function of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy
import torch
from harness import INTERPRET, Input, T, full, graph_of, inputs_of, op, run, symbol, where

from fusegrad.codegen import Kernels, Target, generate, module
from fusegrad.codegen.proofs import prove
from fusegrad.ir import Graph, TensorType, building, emit, verify
from fusegrad.ir.evaluate import evaluate
from fusegrad.ir.loops.body import Body
from fusegrad.runtime.kernels.proofs import unproved_at

TIME, B, D, H = symbol("s0"), symbol("s1"), symbol("s2"), symbol("s3")
STATES = 4
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


def delayed(h: T, x: T) -> Sequence[T]:
    """What is handed on keeps nothing of what was."""
    return [x * x, h + x]


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
        "delayed": on_rows(delayed, "h", "x", dtype),
        "delayed, reversed": on_rows(delayed, "h", "x", dtype, reverse=True),
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


# ------------------------------------------------------------------ beside the evaluator
AT_ONCE = replace(INTERPRET, units=1 << 20)
"""A device with more units than elements: many steps at once."""
LINEAR = ("gated", "gated, reversed", "gated, flipped, batch first", "derivative", "sum", "of numbers", "selective")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def agrees(loop: Loop, sizes: Mapping[sympy.Symbol, int], target: Target, kernels: int = 1) -> Kernels:
    """The kernels' results are the evaluator's, and every access in them is proved."""
    graph = loop.graph()
    made = generate(graph, target=target, hints=sizes, name="loop")
    assert len(made.kernels) == kernels
    assert all(p.proved for p in prove(graph, made)), [str(f) for p in prove(graph, made) for f in p.faults]
    assert not unproved_at(graph, made, sizes)  # in numbers, too
    given = [v * 0.3 for v in inputs_of(graph, sizes)]
    found = run(made, module(made.kernels), graph, given, sizes)
    wanted = evaluate(graph, [v.double().numpy() for v in given], sizes)
    for x, y in zip(found, wanted, strict=True):
        assert y is not None
        scale = max(1.0, float(np.abs(y).max())) if y.size else 1.0
        np.testing.assert_allclose(x.double().numpy(), y, rtol=0, atol=TOLERANCE[x.dtype] * scale)
    return made
