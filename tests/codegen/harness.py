"""Build IR graphs as one writes mathematics, run their kernels under the interpreter, compare with the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from fusegrad.codegen import TARGETS, Kernels, Pointer, Target, generate, module
from fusegrad.ir import Graph, Size, TensorType, Value, building, emit, provenance, verify
from fusegrad.ir.graph import Origin
from fusegrad.runtime.execution.aten import reference
from fusegrad.runtime.kernels import interpreter as interpret
from fusegrad.tracer.dtypes import TO_TORCH

INTERPRET = TARGETS["interpret"]
SMALL = replace(INTERPRET, shared=2)
"""Room for almost nothing: rows go in chunks of 16."""
MANY = replace(INTERPRET, units=20, shared=16)
"""Enough units for the two-level finish."""


def symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, positive=True, integer=True)


M, N, K = symbol("s0"), symbol("s1"), symbol("s2")


class T:
    """A value with torch's operators: broadcasting is spelled out in the graph, types are not promoted."""

    def __init__(self, value: Value) -> None:
        self.v = value

    @property
    def shape(self) -> tuple[Size, ...]:
        return self.v.shape

    @property
    def dtype(self) -> str:
        return self.v.dtype

    def to(self, dtype: str) -> T:
        return self if dtype == self.dtype else T(emit("cast", self.v, dtype=dtype))

    def expand(self, shape: Sequence[Size]) -> T:
        shape, lead = tuple(shape), len(shape) - self.v.ndim
        axes = tuple(range(lead, len(shape)))
        return self if shape == self.shape else T(emit("broadcast", self.v, shape=shape, axes=axes))

    def reshape(self, *shape: Size) -> T:
        return T(emit("reshape", self.v, shape=tuple(shape)))

    def permute(self, *perm: int) -> T:
        return T(emit("permute", self.v, perm=perm))

    @property
    def t(self) -> T:
        return self.permute(1, 0)

    def __getitem__(self, items: Any) -> T:
        items = items if isinstance(items, tuple) else (items,)
        spans = [*items, *[slice(None)] * (self.v.ndim - len(items))]
        start = tuple(s.start or 0 for s in spans)
        stop = tuple(n if s.stop is None else s.stop for s, n in zip(spans, self.shape, strict=True))
        return T(emit("slice", self.v, start=start, stop=stop, step=tuple(s.step or 1 for s in spans)))

    def reduce(self, kind: str, *axes: int, keep: bool = False) -> T:
        axes = tuple(sorted(a % self.v.ndim for a in (axes or range(self.v.ndim))))
        reduced = T(emit(kind, self.v, axes=axes))
        kept = tuple(1 if d in axes else n for d, n in enumerate(self.shape))
        return reduced.reshape(*kept) if keep else reduced

    def sum(self, *axes: int, keep: bool = False) -> T:
        return self.reduce("sum", *axes, keep=keep)

    def amax(self, *axes: int, keep: bool = False) -> T:
        return self.reduce("amax", *axes, keep=keep)

    def mean(self, *axes: int, keep: bool = False) -> T:
        count = sympy.prod([self.shape[a] for a in (axes or range(self.v.ndim))])
        return self.sum(*axes, keep=keep) / count

    def __neg__(self) -> T:
        return T(emit("neg", self.v))

    def __getattr__(self, name: str) -> Callable[[], T]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda: T(emit(name, self.v))


def both(x: Any, y: Any) -> tuple[T, T]:
    """Two operands of one shape; numbers become constants of the other's dtype."""
    if not isinstance(x, T):
        x = full(x, y.shape, y.dtype)
    if not isinstance(y, T):
        y = full(y, x.shape, x.dtype)
    rank = max(x.v.ndim, y.v.ndim)
    padded = [(1,) * (rank - o.v.ndim) + o.shape for o in (x, y)]
    shape = tuple(b if a == 1 else a for a, b in zip(*padded, strict=True))
    return x.expand(shape), y.expand(shape)


def full(value: Any, shape: Sequence[Size], dtype: str) -> T:
    return T(emit("full", value=value, shape=tuple(shape), dtype=dtype))


def iota(size: Size, dtype: str = "i64") -> T:
    return T(emit("iota", size=size, dtype=dtype))


def op(name: str, *xs: Any) -> T:
    """A binary primitive on two things that broadcast."""
    x, y = both(*xs)
    return T(emit(name, x.v, y.v))


def where(c: T, x: Any, y: Any) -> T:
    x, y = both(x, y)
    c, x = both(c, x)
    x, y = both(x, y)
    return T(emit("where", c.v, x.v, y.v))


def cat(xs: Sequence[T], axis: int) -> T:
    return T(emit("cat", *[x.v for x in xs], axis=axis % xs[0].v.ndim))


def gather(x: T, *index: T, axes: tuple[int, ...]) -> T:
    return T(emit("gather", x.v, *[i.v for i in index], axes=axes))


def scatter(base: T, src: T, *index: T, axes: tuple[int, ...], mode: str = "add") -> T:
    return T(emit("scatter", base.v, src.v, *[i.v for i in index], axes=axes, mode=mode))


_OPERATORS = {name: name for name in ("add", "sub", "mul", "floordiv", "pow", "and", "or", "lt", "le", "gt", "ge")}
_OPERATORS |= {"truediv": "div", "mod": "rem"}
for _python, _prim in _OPERATORS.items():
    setattr(T, f"__{_python}__", lambda self, other, prim=_prim: op(prim, self, other))
    setattr(T, f"__r{_python}__", lambda self, other, prim=_prim: op(prim, other, self))


@contextlib.contextmanager
def named(name: str, line: str = "", number: int = 1) -> Iterator[None]:
    """What is built inside carries the user's name and line."""
    with provenance(Origin(name=name, where=f"body.py:{number}", line=line or None)):
        yield


@dataclass
class Input:
    """An input: its symbolic type, and strides if they are not row-major."""

    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...] | None = None
    low: float = 0.0


def graph_of(body: Callable[..., Any], **inputs: Input) -> Graph:
    graph = Graph("body")
    with building(graph):
        args = [T(graph.input(TensorType(i.shape, i.dtype), n, i.strides)) for n, i in inputs.items()]
        result = body(*args)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
    return verify(graph.returning([r.v for r in results]))


def evaluated(size: Size, sizes: Mapping[sympy.Symbol, int]) -> int:
    return size if isinstance(size, int) else int(sympy.sympify(size).subs(dict(sizes)))


def tensor(spec: TensorType, strides: Sequence[Size], sizes: Mapping[sympy.Symbol, int], seed: int) -> torch.Tensor:
    """Random values under the given strides."""
    generator = torch.Generator().manual_seed(seed)
    shape = [evaluated(n, sizes) for n in spec.shape]
    step = [evaluated(s, sizes) for s in strides]
    dtype = TO_TORCH[spec.dtype]
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, step, strict=True)) if all(shape) else 0
    if dtype == torch.bool:
        memory = torch.rand(extent, generator=generator) < 0.5
    elif dtype.is_floating_point:
        memory = torch.randn(extent, generator=generator).to(dtype)
    else:
        memory = torch.randint(0, 7, (extent,), generator=generator).to(dtype)
    return memory.as_strided(shape, step) if all(shape) else torch.empty(shape, dtype=dtype)


def inputs_of(graph: Graph, sizes: Mapping[sympy.Symbol, int], seed: int = 0) -> list[torch.Tensor]:
    return [tensor(v.aval, v.params["strides"], sizes, seed + k) for k, v in enumerate(graph.inputs)]


def run(
    kernels: Kernels, text: str, graph: Graph, inputs: Sequence[torch.Tensor], sizes: Mapping[sympy.Symbol, int]
) -> list[torch.Tensor]:
    """Launch every kernel under the interpreter; outputs start as NaN (or as a recognisable number)."""
    outputs = [empty([evaluated(n, sizes) for n in o.shape], o.dtype) for o in graph.outputs]
    temporaries = [empty([evaluated(n, sizes) for n in b.shape], b.dtype) for b in kernels.temporaries]
    for kernel in kernels.kernels:
        assert all(sizes[s] == n for s, n in kernel.pinned.items())
        scratch = [empty([evaluated(n, sizes) for n in b.shape], b.dtype, b.zeroed) for b in kernel.scratch]
        memory = {"input": inputs, "output": outputs, "temporary": temporaries, "scratch": scratch}
        given = [
            memory[a.buffer.kind][a.buffer.index] if isinstance(a, Pointer) else evaluated(a.value, sizes)
            for a in kernel.arguments
        ]
        if grid := evaluated(kernel.grid, sizes):
            interpret.run(kernel, text, given, grid)
        assert all(not bool(s.any()) for s, b in zip(scratch, kernel.scratch, strict=True) if b.zeroed)
    return outputs


def empty(shape: Sequence[int], dtype: str, zeroed: bool = False) -> torch.Tensor:
    kind = TO_TORCH[dtype]
    poison = float("nan") if kind.is_floating_point else 99 if kind != torch.bool else True
    return torch.full(list(shape), 0 if zeroed else poison, dtype=kind)


TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(got: torch.Tensor, want: torch.Tensor, slack: float = 1.0) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    if not want.dtype.is_floating_point:
        assert torch.equal(got, want), (got, want)
        return
    tolerance = TOLERANCE[want.dtype] * slack
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def agree(
    body: Callable[..., Any],
    sizes: Mapping[sympy.Symbol, int] | None = None,
    target: Target = INTERPRET,
    slack: float = 4.0,
    given: Mapping[str, torch.Tensor] | None = None,
    hints: Mapping[sympy.Symbol, int] | None = None,
    small: bool = False,
    **inputs: Input,
) -> Kernels:
    """Generate, run, compare with the reference; returns the kernels."""
    sizes = sizes or {}
    graph = graph_of(body, **inputs)
    kernels = generate(graph, target=target, hints=hints or sizes, name="body", small=small)
    text = module(kernels.kernels)
    values = inputs_of(graph, sizes)
    for k, name in enumerate(inputs):
        values[k] = (given or {}).get(name, values[k])
    got = run(kernels, text, graph, values, sizes)
    want = reference.run(graph, values, dict(sizes))
    for g, w in zip(got, want, strict=True):
        assert w is not None
        close(g, w, slack)
    return kernels


def text_of(
    body: Callable[..., Any], sizes: Mapping[sympy.Symbol, int] | None = None, target: str = "cuda:90", **inputs: Input
) -> str:
    """The module for a real device."""
    kernels = generate(graph_of(body, **inputs), target=TARGETS[target], hints=sizes or {}, name="body")
    return module(kernels.kernels)
