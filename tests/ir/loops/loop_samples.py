"""Loops made by hand: a body each, inputs for it, and the same loop in numpy, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from fusegrad.ir import Graph, TensorType, Value, building, emit
from fusegrad.ir.loops.body import Body
from fusegrad.ir.transforms.ops import results_of

T = sympy.Symbol("T", integer=True, nonnegative=True)
N = sympy.Symbol("N", integer=True, positive=True)
Array = np.ndarray[Any, Any]
LENGTHS = (0, 1, 2, 7)


@dataclass(frozen=True)
class Loop:
    """`step(carries, xs, wholes)` gives (carries, ys), on values of a graph and on arrays alike."""

    name: str
    init: tuple[TensorType, ...]
    xs: tuple[TensorType, ...]
    wholes: tuple[TensorType, ...]
    step: Callable[..., tuple[Sequence[Value], Sequence[Value]]]
    numpy: Callable[..., tuple[Sequence[Array], Sequence[Array]]]

    def body(self) -> Graph:
        graph = Graph("step")
        parts = [[graph.input(t, f"{kind}{i}") for i, t in enumerate(types)] for kind, types in self.kinds]
        with building(graph):
            carries, ys = self.step(*parts)
        return graph.returning([*carries, *ys])

    @property
    def kinds(self) -> list[tuple[str, tuple[TensorType, ...]]]:
        return [("h", self.init), ("x", self.xs), ("w", self.wholes)]

    @property
    def types(self) -> list[TensorType]:
        """Those of the operands."""
        return [*self.init, *(t.with_shape((T, *t.shape)) for t in self.xs), *self.wholes]

    def graph(self, reverse: bool = False) -> Graph:
        """A graph that is this loop alone."""
        graph = Graph(self.name.replace(" ", "_"))
        inputs = [graph.input(t, f"x{i}") for i, t in enumerate(self.types)]
        with building(graph):
            return graph.returning(results_of(self.emit(inputs, reverse)))

    def emit(self, operands: Sequence[Value], reverse: bool = False) -> Value:
        params = {"carries": len(self.init), "steps": len(self.xs), "length": T, "reverse": reverse}
        return emit("scan", *operands, body=Body(self.body()), **params)

    def expected(self, operands: Sequence[Array], reverse: bool = False) -> list[Array]:
        """The loop in numpy."""
        first, second = len(self.init), len(self.init) + len(self.xs)
        carries, xs, wholes = operands[:first], operands[first:second], operands[second:]
        length = len(xs[0])
        found: dict[int, Sequence[Array]] = {}
        for t in reversed(range(length)) if reverse else range(length):
            carries, found[t] = self.numpy(carries, [x[t] for x in xs], wholes)
        return [*carries, *(np.stack([found[t][i] for t in range(length)]) for i in range(len(found.get(0, ()))))]


def numbers(types: Sequence[TensorType], sizes: Mapping[Any, int], seed: int = 0) -> list[Array]:
    """Random inputs."""
    rng = np.random.default_rng(seed)
    shapes = [tuple(int(sympy.sympify(n).subs(sizes)) for n in t.shape) for t in types]
    return [
        rng.integers(0, 2, s) > 0 if t.dtype == "b1" else rng.normal(size=s) * 0.7
        for t, s in zip(types, shapes, strict=True)
    ]


def f64(*shape: Any) -> TensorType:
    return TensorType(shape, "f64")


def add(x: Value, y: Value) -> Value:
    return emit("add", x, y)


def mul(x: Value, y: Value) -> Value:
    return emit("mul", x, y)


def matmul(x: Value, w: Value) -> Value:
    return emit("dot", x, w, x_axes=(0, 1), y_axes=(1, 2), out_axes=(0, 2))


def _gated(h: Any, x: Any, w: Any) -> Any:
    new = add(mul(h[0], x[0]), x[1])
    return [new], [new]


def _rnn(h: Any, x: Any, w: Any) -> Any:
    new = emit("tanh", add(matmul(h[0], w[0]), x[0]))
    return [new], [emit("sum", mul(new, new), axes=(1,))]


def _rnn_numpy(h: Any, x: Any, w: Any) -> Any:
    new = np.tanh(h[0] @ w[0] + x[0])
    return [new], [(new * new).sum(1)]


def _reset(h: Any, x: Any, w: Any) -> Any:
    new = emit("where", x[1], x[0], emit("max", h[0], x[0]))
    return [new], [new]


def _two(h: Any, x: Any, w: Any) -> Any:
    """Two carries that change places, what was carried before the step among the results, a whole in each step."""
    return [emit("sin", h[1]), add(mul(h[0], w[0]), x[0])], [h[0], mul(h[1], x[0])]


def _norm(h: Any, x: Any, w: Any) -> Any:
    new = add(mul(h[0], w[0]), x[0])
    total = emit("broadcast", emit("sum", mul(new, new), axes=(1,)), shape=new.shape, axes=(0,))
    scaled = mul(new, emit("rsqrt", add(total, emit("full", value=1.0, shape=new.shape, dtype="f64"))))
    return [scaled], [total, scaled]


def _norm_numpy(h: Any, x: Any, w: Any) -> Any:
    new = h[0] * w[0] + x[0]
    total = np.broadcast_to((new * new).sum(1, keepdims=True), new.shape)
    return [new / np.sqrt(total + 1)], [total, new / np.sqrt(total + 1)]


ROW, SQUARE = f64(3, N), f64(N, N)
loops = [
    Loop("gated", (ROW,), (ROW, ROW), (), _gated, lambda h, x, w: ([h[0] * x[0] + x[1]],) * 2),
    Loop("carries alone", (ROW,), (ROW,), (), lambda h, x, w: ([mul(h[0], x[0])], []),
         lambda h, x, w: ([h[0] * x[0]], [])),
    Loop("results alone", (), (ROW,), (ROW,), lambda h, x, w: ([], [mul(x[0], w[0])]),
         lambda h, x, w: ([], [x[0] * w[0]])),
    Loop("rnn", (ROW,), (ROW,), (SQUARE,), _rnn, _rnn_numpy),
    Loop("maximum with reset", (ROW,), (ROW, TensorType((3, N), "b1")), (), _reset,
         lambda h, x, w: ([np.where(x[1], x[0], np.maximum(h[0], x[0]))],) * 2),
    Loop("two carries", (ROW, ROW), (ROW,), (ROW,), _two,
         lambda h, x, w: ([np.sin(h[1]), h[0] * w[0] + x[0]], [h[0], h[1] * x[0]])),
    Loop("normalised", (ROW,), (ROW,), (ROW,), _norm, _norm_numpy),
]  # fmt: skip
