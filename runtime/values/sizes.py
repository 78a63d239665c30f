"""Symbolic sizes at one call: the values of the symbols, read off its inputs, and expressions evaluated at them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from ...ir.lazy_attribute import lazy_attribute
from ...ir.text.text import plain_sympy
from ...ir.types import Size
from .exact_sizes import evaluate_exactly

Tensor = torch.Tensor
Sizes = Mapping[sympy.Symbol, Any]


# ------------------------------------------------------------------ expressions
def evaluate(expr: Any, sizes: Sizes) -> Any:
    """The value of an expression: an int where it is whole, else a float; of a capture's own numbers where sizes are.

    Anything but an expression is its own value.
    """
    if not isinstance(expr, sympy.Basic):
        return expr
    if isinstance(expr, sympy.Symbol):
        return sizes[expr]
    values = [sizes[s] for s in _symbols(expr)]
    if any(isinstance(v, torch.SymInt) for v in values):  # of a capture that is under way
        return evaluate_exactly(plain_sympy(expr), sizes)
    value = _evaluator(expr)(*values)
    return value if isinstance(value, (int, float)) else float(value)


@functools.lru_cache(maxsize=4096)
def _symbols(expr: sympy.Expr) -> tuple[sympy.Symbol, ...]:
    return tuple(sorted(expr.free_symbols, key=str))


@functools.lru_cache(maxsize=4096)
def _evaluator(expr: sympy.Expr) -> Callable[..., Any]:
    """Exact arithmetic, memoised by the values of the symbols."""

    symbols = _symbols(expr)

    @functools.lru_cache(maxsize=256)
    def evaluator(*values: Any) -> Any:
        result = expr.xreplace(dict(zip(symbols, values, strict=True)))
        result = result if result.is_Number else result.doit()
        return int(result) if result.is_Integer else float(result)

    return evaluator


def number(size: Size, sizes: Sizes) -> int:
    """The value of a size, which is a whole number."""
    if isinstance(size, int):
        return size
    return sizes[size] if isinstance(size, sympy.Symbol) else int(evaluate(size, sizes))


def numbers(shape: Sequence[Size], sizes: Sizes) -> tuple[int, ...]:
    """The values of several sizes: a shape, or strides."""
    return tuple([n if type(n) is int else number(n, sizes) for n in shape])


def traced_numbers(shape: Sequence[Any], sizes: Sizes) -> tuple[int, ...]:
    """The values of the shape or strides of a fake tensor."""
    return numbers([n if isinstance(n, int) else n.node.expr for n in shape], sizes)


# ------------------------------------------------------------------ symbols
class BoundSizes(dict[sympy.Symbol, int]):
    """The symbols' values at one call; `key` is made once."""

    @lazy_attribute
    def key(self) -> tuple[int, ...]:
        return tuple(n for n in self.values() if type(n) is not float)

    def learn(self, more: Mapping[sympy.Symbol, int]) -> None:
        """Add the symbols that an opaque node brought."""
        self.update(more)
        self.__dict__.pop("key", None)


def sizes_key(sizes: Sizes) -> tuple[int, ...]:
    """The key that launches are remembered by."""
    return sizes.key if isinstance(sizes, BoundSizes) else tuple(sizes.values())


class Binder:
    """Reads the values of a session's symbols off the real inputs of a graph: off sizes rather than strides.

    kinds: ("size",) for what was saved: a hook may return it in another layout.
    """

    def __init__(self, fakes: Sequence[Any], kinds: Sequence[str] = ("size", "stride")) -> None:
        self.sources: dict[sympy.Symbol, tuple[int, str, int]] = {}
        for position, fake in enumerate(fakes):
            if isinstance(fake, torch.SymInt | torch.SymFloat):
                self._offer(fake.node.expr, position, "value", 0)
        for kind in kinds:
            for position, fake in enumerate(fakes):
                if isinstance(fake, Tensor):
                    for axis, size in enumerate(getattr(fake, kind)()):
                        self._offer(getattr(getattr(size, "node", None), "expr", None), position, kind, axis)

    @classmethod
    def from_sources(cls, sources: Mapping[sympy.Symbol, tuple[int, str, int]]) -> Binder:
        """A binder that knows where each symbol is to be read: (position, "size" | "stride" | "value", axis)."""
        binder = cls(())
        binder.sources.update(sources)
        return binder

    def _offer(self, expr: Any, position: int, kind: str, axis: int) -> None:
        if isinstance(expr, sympy.Symbol):
            self.sources.setdefault(expr, (position, kind, axis))

    def __call__(self, inputs: Sequence[Any]) -> BoundSizes:
        return BoundSizes(self.read(inputs))

    def read(self, inputs: Sequence[Any]) -> dict[sympy.Symbol, Any]:
        """The same from tensors that are being traced: symbols as the tracer's own numbers."""
        return {s: _read(inputs[at], kind, axis) for s, (at, kind, axis) in self.sources.items()}


def _read(value: Any, kind: str, axis: int) -> Any:
    if kind == "value":
        return value
    return value.shape[axis] if kind == "size" else value.stride(axis)
