"""Arithmetic on sizes: ints or polynomials in the symbols of the capture. Every answer is a proof, or None/False."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import sympy

from ...ir.types import Size, simplify_size

Hints = Mapping[sympy.Symbol, int]


def tidy(size: Size | sympy.Basic) -> Size:
    """The size multiplied out: equal polynomials come out equal."""
    return size if isinstance(size, int) else _expanded(size)


@lru_cache(maxsize=65536)
def _expanded(size: sympy.Expr) -> Size:
    return simplify_size(sympy.expand(size))


def same(a: Size, b: Size) -> bool:
    """Provably equal."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return a is b or _equal(a, b)


@lru_cache(maxsize=65536)
def _equal(a: Size, b: Size) -> bool:
    return a == b or tidy(sympy.sympify(a) - b) == 0


def divide(a: Size, b: Size) -> Size | None:
    """a / b where b provably divides a, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    return _quotient(sympy.sympify(a), sympy.sympify(b))


@lru_cache(maxsize=65536)
def _quotient(a: sympy.Expr, b: sympy.Expr) -> Size | None:
    if b == 0:
        return None
    top, bottom = sympy.fraction(sympy.cancel(a / b))
    quotient = sympy.expand(top / bottom) if bottom.is_Integer else None
    if quotient is None or not all(c.is_Integer for c in quotient.as_coefficients_dict().values()):
        return None
    return simplify_size(quotient)


def divmod_sizes(a: Size, b: Size) -> tuple[Size, Size]:
    """A quotient and what is left: (1, 1) of 2 * n and 2 * n - 1; (0, a) where there is none in whole numbers."""
    if isinstance(a, int) and isinstance(b, int):
        return divmod(a, b) if b > 0 else (0, a)
    return _divmod(sympy.sympify(a), sympy.sympify(b))


@lru_cache(maxsize=65536)
def _divmod(a: sympy.Expr, b: sympy.Expr) -> tuple[Size, Size]:
    if not a.free_symbols & b.free_symbols or not (a.is_polynomial() and b.is_polynomial()):
        return 0, simplify_size(a)
    quotient, rest = sympy.div(a, b, *sorted(a.free_symbols | b.free_symbols, key=str), domain="QQ")
    is_whole = all(c.is_Integer for q in (quotient, rest) for c in sympy.expand(q).as_coefficients_dict().values())
    return (tidy(quotient), tidy(rest)) if is_whole else (0, simplify_size(a))


def nonnegative(size: Size) -> bool:
    """Provably >= 0, for symbols >= 0."""
    size = tidy(size)
    if isinstance(size, int):
        return size >= 0
    return all(c >= 0 and _factors_nonnegative(m) for m, c in size.as_coefficients_dict().items())


def _factors_nonnegative(monomial: sympy.Expr) -> bool:
    return all(bool(f.is_nonnegative) or f.is_Symbol for f in monomial.as_powers_dict())


def positive(size: Size) -> bool:
    """Provably > 0; a symbol may be zero."""
    return isinstance(size, int) and size > 0


def longer_than_one(size: Size) -> bool:
    """Not provably 1 or 0: a symbol may be anything."""
    return not isinstance(size, int) or size > 1


def evaluate_size(size: Size, hints: Hints) -> int:
    """The size at the current values of the symbols."""
    return size if isinstance(size, int) else _at(sympy.sympify(size), frozenset(_known(size, hints)))


def _known(size: sympy.Expr, hints: Hints) -> Iterator[tuple[sympy.Symbol, int]]:
    return ((s, int(hints[s])) for s in size.free_symbols if s in hints)


@lru_cache(maxsize=65536)
def _at(size: sympy.Expr, values: frozenset[tuple[sympy.Symbol, int]]) -> int:
    """All symbols at once: sympy compares the operands of a Min or Max, which takes long as long as one is left."""
    return int(size.xreplace(dict(values)))


def symbols(sizes: Iterable[Size]) -> set[sympy.Symbol]:
    return set().union(*(s.free_symbols for s in sizes if not isinstance(s, int)))


def cdiv(size: Size, block: int) -> Size:
    """ceil(size / block)."""
    if block == 1:
        return size
    return -(-size // block) if isinstance(size, int) else simplify_size(sympy.ceiling(size / block))


def whole_times(size: Size, block: Size) -> Size:
    """floor(size / block), at least one, for block > 0.

    Written by a ceiling: of integer symbols a and b sympy 1.14 takes 4 / (a * b) for at least one, and drops the bound.
    """
    if isinstance(size, int) and isinstance(block, int):
        return max(1, size // block)
    times = sympy.ceiling((sympy.sympify(size) + 1) / block) - 1
    return sympy.Max(1, times, evaluate=bool(times.is_number))  # what it would compare with symbols takes long


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n (nor below one)."""
    return 1 << max(0, n - 1).bit_length()
