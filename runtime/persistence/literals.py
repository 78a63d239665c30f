"""Arguments and results that are no tensors, as plain data for JSON; whatever has no literal is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from ...ir.program import ValueRef
from ...ir.text.document import Symbols, document_error, list_from, size_from_document, text_from
from ...ir.text.text import size_text
from ...tracer.torch_private import expression_of
from ..values.exact_sizes import evaluate_exactly

DEEPEST = 8
PLAIN = (bool, int, float, str, type(None))


class NoLiteral(ValueError):
    """A value that cannot be written down; the argument says its type."""


def constant_document(value: Any, expression: Callable[[Any], Any] = expression_of) -> Any:
    """A value as dicts, lists, texts and numbers; `expression` of a symbolic size. Raises NoLiteral."""
    kind = type(value)
    if isinstance(value, torch.SymInt):
        return {"size": size_text(sympy.sympify(expression(value)))}
    if kind is float and not math.isfinite(value):
        return {"float": repr(value)}
    if kind is str and not value.isprintable():
        raise NoLiteral("a text with line breaks")
    if kind in PLAIN and (kind is not int or abs(value) < 1 << 62):
        return value
    if kind in (tuple, list, torch.Size):
        return {_SEQUENCES[kind]: [constant_document(v, expression) for v in value]}
    if kind is dict:
        return {"dict": [[constant_document(k), constant_document(v, expression)] for k, v in value.items()]}
    if kind in (torch.dtype, torch.device):
        return {kind.__name__: str(value).removeprefix("torch.")}
    raise NoLiteral(f"a {kind.__name__}")


_SEQUENCES: dict[type, str] = {tuple: "tuple", list: "list", torch.Size: "shape"}


def constant_from(data: Any, symbols: Symbols, at: str, depth: int = DEEPEST) -> Any:
    """The value that `constant_document` wrote; a size in it stays an expression. Raises ParseError."""
    if isinstance(data, str):
        return text_from(data, at)
    if data is None or isinstance(data, bool | int | float):
        return data
    if not isinstance(data, dict) or len(data) != 1 or not depth:
        raise document_error("a constant is of no known form", at)
    ((kind, inner),) = data.items()
    if kind not in _KINDS:
        raise document_error("a constant is of no known form", at)
    return _KINDS[kind](inner, at, lambda item: constant_from(item, symbols, at, depth - 1), symbols)


Each = Callable[[Any], Any]


def _dict(inner: Any, at: str, each: Each, symbols: Symbols) -> dict[Any, Any]:
    pairs = [list_from(p, at, 2) for p in list_from(inner, at)]
    return {each(k): each(v) for k, v in pairs}


def _float(inner: Any, at: str, each: Each, symbols: Symbols) -> float:
    if inner not in ("inf", "-inf", "nan"):
        raise document_error("a constant is of no known form", at)
    return float(inner)


def _dtype(inner: Any, at: str, each: Each, symbols: Symbols) -> torch.dtype:
    dtype = getattr(torch, text_from(inner, at, 30), None)
    if not isinstance(dtype, torch.dtype):
        raise document_error("there is no such dtype", at)
    return dtype


_KINDS: dict[str, Callable[[Any, str, Each, Symbols], Any]] = {
    "size": lambda inner, at, each, symbols: size_from_document(inner, symbols, at),
    "float": _float,
    "tuple": lambda inner, at, each, symbols: tuple(each(v) for v in list_from(inner, at)),
    "list": lambda inner, at, each, symbols: [each(v) for v in list_from(inner, at)],
    "shape": lambda inner, at, each, symbols: Shape(tuple(each(v) for v in list_from(inner, at))),
    "dict": _dict,
    "dtype": _dtype,
    "device": lambda inner, at, each, symbols: torch.device(text_from(inner, at, 30)),
}


def places_document(places: Sequence[ValueRef | None]) -> list[Any]:
    """The places of tensors, as pairs of kind and index."""
    return [None if p is None else list(p) for p in places]


class Shape(tuple[Any, ...]):
    """A torch.Size whose numbers may be expressions still."""


def with_sizes(value: Any, sizes: Mapping[sympy.Symbol, Any]) -> Any:
    """The constant with its expressions computed."""
    if isinstance(value, Shape):
        return torch.Size([with_sizes(v, sizes) for v in value])
    if isinstance(value, tuple | list):
        return type(value)(with_sizes(v, sizes) for v in value)
    if isinstance(value, dict):
        return {k: with_sizes(v, sizes) for k, v in value.items()}
    return evaluate_exactly(value, sizes)


def same_constant(a: Any, b: Any) -> bool:
    """True for the same constants: 1, 1.0 and True differ, NaN is itself."""
    if type(a) is not type(b) and {type(a), type(b)} != {Shape, torch.Size}:
        return False
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same_constant, a, b))
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(map(same_constant, a.values(), b.values()))
    return repr(a) == repr(b)
