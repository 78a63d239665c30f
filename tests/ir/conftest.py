"""Graphs for the tests of `ir`: random ones, inputs for them, and running a graph or its steps with numpy."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import sympy

from fusegrad.ir import Graph, TensorType, Value, building, emit
from fusegrad.ir.evaluate import evaluate
from fusegrad.ir.passes.fuse import Group, Step
from fusegrad.ir.passes.identities.constants import rounded
from fusegrad.ir.rewrite import extract

M = sympy.Symbol("M", integer=True, positive=True)
SIZES: Mapping[sympy.Symbol, int] = {M: 3}
SPECIAL = (0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 0.5, 3.0, 2.0**-100)
UNARY = ("neg", "abs", "sqrt", "floor", "reciprocal", "sigmoid", "exp")
BINARY = ("add", "sub", "mul", "div", "max", "min")
WHOLE = ("add", "sub", "mul", "max", "min", "and", "or", "xor")
COMPARE = ("eq", "ne", "lt", "ge")
CONSTANTS = {"f32": SPECIAL, "bf16": SPECIAL, "f16": SPECIAL, "f64": SPECIAL, "i32": (0, 1, -1, 3), "b1": (True, False)}
NUMPY = {"f32": np.float32, "f16": np.float16, "f64": np.float64, "i32": np.int32, "i64": np.int64, "b1": np.bool_}


def _count(size: Any, sizes: Mapping[Any, int] = SIZES) -> int:
    return int(size.xreplace(sizes)) if isinstance(size, sympy.Basic) else size


class Grower:
    """Grows a random graph: each step adds one node to what is there."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.graph = Graph(f"random_{seed}")
        types = [((M, 4), "f32"), ((4,), "f32"), ((M, 1), "bf16"), ((M, 4), "i32"), ((2, M), "b1"), ((), "f32")]
        self.values = [self.graph.input(TensorType(s, d), f"x{i}") for i, (s, d) in enumerate(types)]
        self.steps: list[Callable[[Value], Value | None]] = [
            self.unary, self.binary, self.binary, self.constant, self.constant, self.compare, self.choose, self.cast,
            self.cast, self.broadcast, self.broadcast, self.reshape, self.permute, self.slice, self.pad, self.flip,
            self.cat, self.reduce, self.reduce, self.negate_twice,
        ]  # fmt: skip

    def grow(self, nodes: int) -> Graph:
        with building(self.graph):
            for _ in range(nodes):
                added = self.rng.choice(self.steps)(self.rng.choice(self.values[-8:] + self.values[:6]))
                self.values += [added] if added is not None and added.ndim <= 4 else []
        outputs = self.rng.sample(self.values[6:], min(3, len(self.values) - 6)) + self.values[-1:]
        return self.graph.returning(outputs)

    def partner(self, x: Value) -> Value:
        alike = [v for v in self.values if v.shape == x.shape and v.dtype == x.dtype]
        return self.rng.choice(alike)

    def unary(self, x: Value) -> Value | None:
        return emit(self.rng.choice(UNARY), x) if x.aval.is_float else None

    def negate_twice(self, x: Value) -> Value | None:
        return emit("neg", emit("neg", x)) if x.aval.is_float else None

    def binary(self, x: Value) -> Value | None:
        if x.dtype == "b1":
            return emit(self.rng.choice(("and", "or", "xor")), x, self.partner(x))
        return emit(self.rng.choice(BINARY if x.aval.is_float else WHOLE), x, self.partner(x))

    def constant(self, x: Value) -> Value | None:
        number = emit("full", value=self.rng.choice(CONSTANTS[x.dtype]), shape=x.shape, dtype=x.dtype)
        names = ("and", "or", "xor") if x.dtype == "b1" else BINARY if x.aval.is_float else WHOLE
        pair = [x, number]
        self.rng.shuffle(pair)
        return emit(self.rng.choice(names), *pair)

    def compare(self, x: Value) -> Value | None:
        return emit("not", x) if x.dtype == "b1" else emit(self.rng.choice(COMPARE), x, self.partner(x))

    def choose(self, x: Value) -> Value | None:
        flags = [v for v in self.values if v.dtype == "b1" and v.shape == x.shape]
        flag = self.rng.choice(flags) if flags else emit("full", value=True, shape=x.shape, dtype="b1")
        return emit("where", flag, x, self.partner(x))

    def cast(self, x: Value) -> Value | None:
        allowed = ("f32", "bf16", "f16", "f64", "b1") if x.aval.is_float else ("f32", "bf16", "i32", "b1")
        return emit("cast", x, dtype=self.rng.choice(allowed))

    def broadcast(self, x: Value) -> Value | None:
        at = self.rng.randint(0, x.ndim)
        shape = (*x.shape[:at], self.rng.choice((1, 2, M)), *x.shape[at:])
        axes = tuple(i + (i >= at) for i in range(x.ndim))
        wider = tuple(self.rng.choice((n, 2)) if n == 1 else n for n in shape)
        return emit("broadcast", x, shape=wider, axes=axes)

    def reshape(self, x: Value) -> Value | None:
        if x.ndim < 2 or self.rng.random() < 0.5:
            at = self.rng.randint(0, x.ndim)
            return emit("reshape", x, shape=(*x.shape[:at], 1, *x.shape[at:]))
        at = self.rng.randint(0, x.ndim - 2)
        return emit("reshape", x, shape=(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :]))

    def permute(self, x: Value) -> Value | None:
        return emit("permute", x, perm=tuple(self.rng.sample(range(x.ndim), x.ndim)))

    def slice(self, x: Value) -> Value | None:
        start = tuple(self.rng.randint(0, max(_count(n) - 1, 0)) if isinstance(n, int) else 0 for n in x.shape)
        return emit("slice", x, start=start, stop=x.shape, step=tuple(self.rng.choice((1, 1, 2)) for _ in x.shape))

    def pad(self, x: Value) -> Value | None:
        lo, hi, inner = (tuple(self.rng.choice((0, 0, 1)) for _ in x.shape) for _ in range(3))
        return emit("pad", x, lo=lo, hi=hi, inner=inner) if all(_count(n) for n in x.shape) else None

    def flip(self, x: Value) -> Value | None:
        return emit("flip", x, axes=tuple(a for a in range(x.ndim) if self.rng.random() < 0.5))

    def cat(self, x: Value) -> Value | None:
        return emit("cat", x, self.partner(x), axis=self.rng.randrange(x.ndim)) if x.ndim else None

    def reduce(self, x: Value) -> Value | None:
        axes = tuple(a for a in range(x.ndim) if self.rng.random() < 0.5)
        if x.dtype == "b1" or any(_count(x.shape[a]) == 0 for a in axes):
            return None
        return emit(self.rng.choice(("sum", "amax", "amin")), x, axes=axes)


def random_inputs(
    graph: Graph, seed: int = 0, special: bool = True, sizes: Mapping[Any, int] = SIZES
) -> list[np.ndarray]:
    """Arrays for the inputs of a graph; floats are small dyadic numbers, so that sums of them are exact."""
    rng = np.random.default_rng(seed)
    return [_array(v.aval, rng, special, sizes) for v in graph.inputs]


def _array(aval: TensorType, rng: np.random.Generator, special: bool, sizes: Mapping[Any, int]) -> np.ndarray:
    shape = tuple(_count(n, sizes) for n in aval.shape)
    values = rng.integers(-8, 9, size=shape) / 4
    if special and aval.is_float:
        values = np.where(rng.random(shape) < 0.2, rng.choice(SPECIAL, size=shape), values)
    return np.asarray(values if aval.is_float else np.floor(values)).astype(NUMPY.get(aval.dtype, np.float32))


def run_steps(
    graph: Graph, steps: Sequence[Step], inputs: Sequence[np.ndarray], sizes: Mapping[Any, int] = SIZES
) -> list[np.ndarray | None]:
    """What a runtime does: groups, views and single nodes in order, each reading what is in memory by then."""
    memory = dict(zip((v.id for v in graph.inputs), inputs, strict=True))
    for step in steps:
        if isinstance(step, Group):
            results = run_rounded(step.graph, [memory[v.id] for v in step.inputs], sizes)
            memory.update(zip((v.id for v in step.outputs), results, strict=True))
        else:
            memory[step.value.id] = _run_node(step.value, memory, sizes)
    return [None if o is None else memory[o.id] for o in graph.outputs]


def run_rounded(
    graph: Graph, inputs: Sequence[np.ndarray], sizes: Mapping[Any, int] = SIZES
) -> list[np.ndarray | None]:
    """The evaluator node by node, every result rounded to its dtype."""
    memory = dict(zip((v.id for v in graph.inputs), inputs, strict=True))
    for value in graph.order():
        memory[value.id] = _run_node(value, memory, sizes)
    return [None if o is None else memory[o.id] for o in graph.outputs]


def _run_node(value: Value, memory: Mapping[int, np.ndarray], sizes: Mapping[Any, int]) -> np.ndarray:
    args = list(dict.fromkeys(value.args))
    (result,) = evaluate(extract([value], args, name="one"), [memory[a.id] for a in args], sizes)
    if value.dtype == "bf16":
        return np.vectorize(lambda x: rounded(float(x), "bf16"), otypes=[np.float64])(result)
    with np.errstate(all="ignore"):
        return np.asarray(result).astype(NUMPY[value.dtype])


def bits(array: np.ndarray) -> np.ndarray:
    """Equal for equal bits, except that every NaN is the same."""
    wide = np.asarray(array)
    if wide.dtype.kind != "f":
        return wide
    return np.where(np.isnan(wide), 12345.0, np.where((wide == 0) & np.signbit(wide), 54321.0, wide.astype(np.float64)))


@pytest.fixture(scope="session")
def run() -> Callable[..., list[np.ndarray | None]]:
    return lambda graph, inputs, sizes=SIZES: evaluate(graph, inputs, sizes)


@pytest.fixture(scope="session")
def same() -> Callable[..., None]:
    """Asserts that two graphs compute the same: bit for bit, or within `rtol`."""

    def check(a: Graph, b: Graph, seed: int = 0, rtol: float = 0.0, sizes: Mapping[Any, int] = SIZES) -> None:
        inputs = random_inputs(a, seed, special=rtol == 0.0, sizes=sizes)
        compute = evaluate if rtol else run_rounded
        for x, y in zip(compute(a, inputs, sizes), compute(b, inputs, sizes), strict=True):
            if rtol:
                np.testing.assert_allclose(np.asarray(y, np.float64), np.asarray(x, np.float64), rtol=rtol, atol=rtol)
            else:
                np.testing.assert_array_equal(bits(y), bits(x))

    return check


@pytest.fixture(scope="session")
def same_steps() -> Callable[[Graph, Sequence[Step], int], None]:
    """Asserts that steps compute what their graph does, bit for bit."""

    def check(graph: Graph, steps: Sequence[Step], seed: int = 0) -> None:
        inputs = random_inputs(graph, seed)
        for x, y in zip(run_rounded(graph, inputs), run_steps(graph, steps, inputs), strict=True):
            np.testing.assert_array_equal(bits(y), bits(x))

    return check


@pytest.fixture(scope="session")
def grow() -> Callable[..., Graph]:
    """A random graph from a seed."""
    return lambda seed, nodes=25: Grower(seed).grow(nodes)


@pytest.fixture(scope="session")
def inputs_for() -> Callable[..., Sequence[np.ndarray]]:
    return random_inputs
