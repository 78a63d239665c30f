"""Numbers made of sizes, computed again as Python computed them: from plain numbers, or from the symbols of a capture.

sympy's classes, and those that torch adds, each by what the user wrote: FloorDiv is //, FloatPow is **, in that order.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch

Numbers = Mapping[sympy.Symbol, Any]
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def compute_number(expr: Any, numbers: Numbers) -> Any:
    """The value of an expression. Raises KeyError for a symbol, or a function, that is not known."""
    if isinstance(expr, sympy.Symbol):
        return numbers[expr]
    if expr.is_Atom:
        return _atom(expr)
    if expr.is_Mul and (scale := expr.args[0]).is_Rational and not scale.is_Integer:
        return _scaled(expr, scale, numbers)
    return RULES[type(expr).__name__](*(compute_number(a, numbers) for a in expr.args))


def _atom(expr: Any) -> Any:
    if expr.is_Integer:
        return int(expr)
    return bool(expr) if expr in (sympy.true, sympy.false) else float(expr)


def _scaled(expr: Any, scale: Any, numbers: Numbers) -> Any:
    """A product with a fraction, without a float where it is a whole number."""
    top = functools.reduce(operator.mul, (compute_number(a, numbers) for a in expr.args[1:])) * int(scale.p)
    return top // int(scale.q) if expr.is_integer else top / int(scale.q)


def _power(base: Any, exponent: Any) -> Any:
    return 1 / base if isinstance(exponent, int) and exponent == -1 else base**exponent


def _unary(name: str) -> Callable[[Any], Any]:
    plain, symbolic = getattr(math, name), getattr(torch, f"_sym_{name}", None)

    def call(value: Any) -> Any:
        return symbolic(value) if symbolic is not None and isinstance(value, SYMBOLIC) else plain(value)

    return call


without_fraction: Callable[[Any], Any] = torch.sym_int
"""A number without its fraction."""
_not: Callable[[Any], Any] = torch.sym_not
_float: Callable[[Any], Any] = torch.sym_float


def _fold(of: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *args: functools.reduce(of, args)


UNARY = (
    "sqrt", "log", "log2", "exp", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "asinh",
)  # fmt: skip
RULES: dict[str, Callable[..., Any]] = {
    "Add": _fold(operator.add),
    "Mul": _fold(operator.mul),
    "Pow": _power,
    "PowByNatural": operator.pow,
    "FloatPow": operator.pow,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "ModularIndexing": lambda a, b, n: (a // b) % n,
    "Max": _fold(torch.sym_max),
    "Min": _fold(torch.sym_min),
    "Abs": abs,
    "ToFloat": _float,
    "TruncToInt": without_fraction,
    "TruncToFloat": lambda a: _float(without_fraction(a)),
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
    "floor": math.floor,
    "ceiling": math.ceil,
    "RoundToInt": round,
    "RoundHalfEven": round,
    "sign": lambda a: (a > 0) - (a < 0),
    "RoundDecimal": round,
    "Where": torch.sym_ite,
    "Identity": lambda a: a,
    "LShift": operator.lshift,
    "RShift": operator.rshift,
    "BitwiseFn_bitwise_and": operator.and_,
    "BitwiseFn_bitwise_or": operator.or_,
    "BitwiseFn_bitwise_xor": operator.xor,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
    "And": _fold(operator.and_),
    "Or": _fold(operator.or_),
    "Not": _not,
    **{f"OpaqueUnaryFn_{name}": _unary(name) for name in UNARY},
    **{name: _unary(name) for name in UNARY},
}
"""By the name of the class."""
