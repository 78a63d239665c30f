"""Sizes computed exactly from the sizes of tensors: plain numbers, or the symbols of a capture that is under way.

A value is a fraction of two whole numbers until the end, so that no symbolic size ever becomes a float on the way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch

from ...tracer.arithmetic import RULES, compute_number, without_fraction

Sizes = Mapping[sympy.Symbol, Any]
Fraction = tuple[Any, Any]


def evaluate_exactly(expr: Any, sizes: Sizes) -> Any:
    """The value of an expression: whole where it is a whole number, else a float. Raises KeyError for an unknown size,
    ValueError for a function that sizes have no use for."""
    if not isinstance(expr, sympy.Basic):
        return expr
    top, bottom = _fraction(expr, sizes)
    if _is_one(bottom):
        return top
    divides = isinstance(top, int | torch.SymInt) and isinstance(bottom, int) and bool(top % bottom == 0)
    return top // bottom if expr.is_integer or divides else top / bottom


def _is_one(bottom: Any) -> bool:
    return isinstance(bottom, int) and bottom == 1


def _fraction(expr: Any, sizes: Sizes) -> Fraction:
    if isinstance(expr, sympy.Symbol):
        return sizes[expr], 1
    if isinstance(expr, sympy.Rational):
        return int(expr.p), int(expr.q)
    if isinstance(expr, sympy.Float):
        return float(expr), 1
    rule = _RULES.get(expr.func.__name__)
    if rule is None or (expr.is_Pow and not _is_of_roots(expr.exp)):
        return _in_floats(expr, sizes)
    return rule(expr, [_fraction(a, sizes) for a in expr.args])


def _plus(a: Fraction, b: Fraction) -> Fraction:
    if _is_one(a[1]) and _is_one(b[1]):
        return a[0] + b[0], 1
    return a[0] * b[1] + b[0] * a[1], a[1] * b[1]


def _times(a: Fraction, b: Fraction) -> Fraction:
    return a[0] * b[0], a[1] * b[1]


def _is_of_roots(exponent: Any) -> bool:
    """True if a power is one of square roots."""
    return bool(exponent.is_number and exponent.is_real) and float(2 * exponent).is_integer()


def _in_floats(expr: Any, sizes: Sizes) -> Fraction:
    """Evaluate what is no fraction of sizes: a logarithm, say."""
    if unknown := {type(e).__name__ for e in sympy.preorder_traversal(expr) if not e.is_Atom} - RULES.keys():
        raise ValueError(f"a size has no use for {min(unknown)}")
    return compute_number(expr, sizes), 1


def _power(expr: Any, args: list[Fraction]) -> Fraction:
    base, exponent = args[0], sympy.Rational(float(expr.exp)) if expr.exp.is_Float else expr.exp
    top, bottom = base if exponent > 0 else (base[1], base[0])
    times = int(abs(exponent.p))
    if exponent.q == 2:
        top, bottom = _root(top) if not _is_one(top) else 1, _root(bottom) if not _is_one(bottom) else 1
    return math.prod([top] * times), math.prod([bottom] * times)


def _root(value: Any) -> Any:
    return math.sqrt(value) if isinstance(value, int | float) else torch.sym_sqrt(value)


def _modulo(expr: Any, args: list[Fraction]) -> Fraction:
    (a, b), (c, d) = args
    return (a * d) % (c * b), b * d


def _extreme(of: Callable[[Any, Any], Any]) -> Callable[[Any, list[Fraction]], Fraction]:
    def rule(expr: Any, args: list[Fraction]) -> Fraction:
        bottom = math.prod(b for _, b in args)
        tops = [a if _is_one(bottom) else a * (bottom // b) for a, b in args]
        return functools.reduce(of, tops), bottom

    return rule


_RULES: dict[str, Callable[[Any, list[Fraction]], Fraction]] = {
    "Add": lambda expr, args: functools.reduce(_plus, args),
    "Mul": lambda expr, args: functools.reduce(_times, args),
    "Pow": _power,
    "floor": lambda expr, args: (without_fraction(args[0][0] // args[0][1]), 1),
    "ceiling": lambda expr, args: (-without_fraction(-args[0][0] // args[0][1]), 1),
    "Mod": _modulo,
    "Abs": lambda expr, args: (abs(args[0][0]), abs(args[0][1])),
    "Max": _extreme(torch.sym_max),
    "Min": _extreme(torch.sym_min),
}
"""By the name of sympy's function; `ir.text.plain` writes torch's in terms of these."""
