"""Integers, conditions and addresses as terms of z3; those of Python where nothing in them is open.

An integer is the mathematical one. `wraps` says where the device's, of 32 bits, is another: something on the way to it
did not fit. What memory holds is free, and may wrap around, for that is what was written (`data`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import z3
from z3 import z3util

Term: TypeAlias = Any  # int, or z3.ArithRef
NEVER, ALWAYS = z3.BoolVal(False), z3.BoolVal(True)


@dataclass(frozen=True)
class Number:
    """An integer of so many bits; 0: a constant of the compiler."""

    term: Term
    bits: int = 0
    wraps: z3.BoolRef = NEVER
    data: bool = False


@dataclass(frozen=True)
class Truth:
    term: z3.BoolRef
    wraps: z3.BoolRef = NEVER


@dataclass(frozen=True)
class Place:
    """So many elements behind an argument."""

    pointer: str
    term: Term = 0
    wraps: z3.BoolRef = NEVER


Value: TypeAlias = "Number | Truth | Place | None"
"""None: a float, or anything else of which nothing is known."""


# ------------------------------------------------------------------ logic and arithmetic
def truth(known: Any) -> z3.BoolRef:
    return known if isinstance(known, z3.BoolRef) else z3.BoolVal(bool(known))


def either(*conditions: z3.BoolRef) -> z3.BoolRef:
    open_ = [c for c in conditions if not z3.is_false(c)]
    if any(map(z3.is_true, open_)):
        return ALWAYS
    return z3.Or(open_) if open_ else NEVER


def both(*conditions: z3.BoolRef) -> z3.BoolRef:
    open_ = [c for c in conditions if not z3.is_true(c)]
    if any(map(z3.is_false, open_)):
        return NEVER
    return z3.And(open_) if open_ else ALWAYS


def choice(test: Any, a: Term, b: Term) -> Term:
    """a where the test holds, else b."""
    test = truth(test)
    if z3.is_true(test) or z3.is_false(test):
        return a if z3.is_true(test) else b
    return z3.If(test, a, b)


def floor_quotient(x: Term, d: Term) -> Term:
    """Of a positive divisor."""
    if isinstance(x, int) and isinstance(d, int):
        return x // d
    return x if isinstance(d, int) and d == 1 else _integer(x) / _integer(d)


def quotient(x: Term, d: Term) -> Term:
    """As a device divides: rounded towards zero."""
    if isinstance(x, int) and isinstance(d, int):
        return (abs(x) // abs(d)) * (1 if (x < 0) == (d < 0) else -1) if d else 0
    return choice(x >= 0, floor_quotient(x, d), -floor_quotient(-x, d))


def _integer(x: Term) -> z3.ArithRef:
    return z3.IntVal(x) if isinstance(x, int) else x


def variables_in(term: Term) -> list[z3.ExprRef]:
    return z3util.get_vars(term) if isinstance(term, z3.ExprRef) else []


def fits(x: Term, bits: int, signed: bool = True) -> z3.BoolRef:
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if signed else (0, 1 << bits)
    return truth(low <= x < high) if isinstance(x, int) else z3.And(low <= x, x < high)


# ------------------------------------------------------------------ sizes
Sizes = Mapping[sympy.Symbol, Term]


def term_of(size: Any, sizes: Sizes) -> Term:
    """An expression of sympy in sizes: an integer, or for a condition a truth."""
    if isinstance(size, int | sympy.Integer):
        return int(size)
    if isinstance(size, sympy.Symbol):
        return sizes[size]
    numerator, denominator = size.as_numer_denom() if isinstance(size, sympy.Expr) else (size, 1)
    if denominator != 1:  # s0 * s1 / 4, of which a guard says that it is whole
        return floor_quotient(term_of(numerator, sizes), term_of(denominator, sizes))
    if (rule := RULES.get(type(size).__name__)) is None:
        raise NotImplementedError(f"a size {size!r} of {type(size).__name__}")
    return rule(sizes, *size.args)


Rule: TypeAlias = Callable[..., Term]


def _folded(function: Callable[[Term, Term], Term]) -> Rule:
    return lambda sizes, *args: functools.reduce(function, [term_of(a, sizes) for a in args])


def _rounded(sign: int) -> Rule:
    """floor(x / d), and -floor(-x / d)"""

    def rule(sizes: Sizes, x: sympy.Expr) -> Term:
        numerator, denominator = (term_of(part, sizes) for part in x.as_numer_denom())
        return sign * floor_quotient(sign * numerator, denominator)

    return rule


RULES: dict[str, Rule] = {
    "Add": _folded(lambda a, b: a + b),
    "Mul": _folded(lambda a, b: a * b),
    "Pow": lambda sizes, base, power: functools.reduce(lambda a, b: a * b, [term_of(base, sizes)] * int(power), 1),
    "Min": _folded(lambda a, b: choice(a <= b, a, b)),
    "Max": _folded(lambda a, b: choice(a >= b, a, b)),
    "floor": _rounded(1),
    "ceiling": _rounded(-1),
    **dict.fromkeys(("FloorDiv", "CleanDiv"), _folded(floor_quotient)),
    **dict.fromkeys(("Mod", "PythonMod"), _folded(lambda a, b: a - b * floor_quotient(a, b))),
    "Equality": _folded(lambda a, b: a == b),
    "Unequality": _folded(lambda a, b: a != b),
    "StrictLessThan": _folded(lambda a, b: a < b),
    "LessThan": _folded(lambda a, b: a <= b),
    "StrictGreaterThan": _folded(lambda a, b: a > b),
    "GreaterThan": _folded(lambda a, b: a >= b),
    "And": _folded(lambda a, b: both(truth(a), truth(b))),
    "Or": _folded(lambda a, b: either(truth(a), truth(b))),
    "Not": lambda sizes, x: z3.Not(truth(term_of(x, sizes))),
    "BooleanTrue": lambda sizes: True,
    "BooleanFalse": lambda sizes: False,
}
