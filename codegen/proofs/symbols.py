"""Sizes as polynomials: the symbols of a capture, and what a kernel's guards say about them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import reduce
from random import Random

import sympy

from ...ir.types import Size
from .arithmetic import Arithmetic
from .polynomials import ONE, ZERO, Poly, Sample, divide_terms, exact_quotient, is_integral, value_at


class NoSize(Exception):
    """An expression that is read as no size."""


class Sizes:
    """Reads sympy expressions. A symbol of which a part is a size, C / 32 or C / G, is 32 or G times an atom."""

    def __init__(
        self,
        arithmetic: Arithmetic,
        pinned: Mapping[sympy.Symbol, int],
        dimensions: Iterable[Size],
        guards: Iterable[sympy.Basic] = (),
    ) -> None:
        self.arithmetic, self.world = arithmetic, arithmetic.world
        self.pinned = dict(pinned)
        dimensions, guards = [*dimensions], [*guards]
        self._divisors = _divisors(dimensions, guards)
        self._shares = _shares(dimensions, guards)
        self._natural = {n for n in dimensions if isinstance(n, sympy.Symbol)}  # sizes of tensors, whatever is said
        self._polynomials: dict[sympy.Basic, Poly] = {}
        self._wholes: dict[Poly, Poly] = {}

    def __call__(self, size: Size) -> Poly:
        if isinstance(size, int):
            return Poly.of(size)
        if size not in self._polynomials:
            self._polynomials[size] = self._read(size)
        return self._polynomials[size]

    def integer(self, size: Size) -> Poly:
        """A size that is an integer: of s0 * s1 / 4 nothing is known but that it is one, and four times it s0 * s1."""
        poly = self(size)
        if is_integral(poly) or is_integral(poly := divide_terms(poly, 1)):
            return poly
        if poly not in self._wholes:
            number = math.lcm(*(Fraction(c).denominator for c in poly.terms.values()))
            least = 0 if self.world.holds(poly) else None
            atom = self.world.atom(self.world.atoms.text(poly), lambda s, _: int(value_at(poly, s)), least)
            numerator = divide_terms(poly * number, 1)
            self.world.bound_below(atom.top, Poly.of(number), numerator)
            self.world.bound_above(atom.top, Poly.of(number), numerator)
            self._wholes[poly] = atom
        return self._wholes[poly]

    def _read(self, size: sympy.Expr) -> Poly:
        if size.is_Integer:
            return Poly.of(int(size))
        if size.is_Rational:
            return Poly({(): Fraction(int(size.p), int(size.q))})
        if size.is_Symbol:
            return self._symbol(size)
        if size.is_Add:
            return reduce(lambda a, b: a + b, map(self, size.args), ZERO)
        if size.is_Mul and (quotient := self._quotient(size)) is not None:
            return quotient
        if size.is_Mul:
            return reduce(lambda a, b: a * b, map(self, size.args), ONE)
        if size.is_Pow and size.exp.is_Integer and size.exp > 0:
            return reduce(lambda a, b: a * b, [self(size.base)] * int(size.exp), ONE)
        return self._function(size)

    def _quotient(self, size: sympy.Expr) -> Poly | None:
        """A quotient by other sizes, where it is exact."""
        over, under = size.as_numer_denom()
        return exact_quotient(self(over), self(under)) if under.free_symbols else None

    def _symbol(self, symbol: sympy.Symbol) -> Poly:
        if symbol in self.pinned:
            return Poly.of(self.pinned[symbol])
        divisor, remainder = self._divisors.get(symbol, (1, 0))
        if symbol in self._shares and divisor == 1:
            of, number = self._shares[symbol]
            name = f"{symbol}/{of}" if number == 1 else f"{symbol}/({number}*{of})"
            return self(of) * number * self.world.atom(name, _draw_size, 1 if symbol.is_positive else 0)
        base = f"({symbol}-{remainder})" if remainder else str(symbol)
        name = str(symbol) if divisor == 1 else f"{base}/{divisor}"
        least = None
        if symbol.is_positive:
            least = 1 if remainder == 0 else 0
        elif symbol in self._natural or symbol.is_nonnegative:
            least = 0
        return self.world.atom(name, _draw_size, least) * divisor + remainder

    def _function(self, size: sympy.Expr) -> Poly:
        name = type(size).__name__
        if name in ("Min", "Max"):
            return reduce(lambda a, b: self.arithmetic.extremum(name.lower(), a, b), map(self, size.args))
        poly = None
        if name in ("ceiling", "floor"):
            x, d = map(self, size.args[0].as_numer_denom())
            quotients = self.arithmetic.divide(x, d) if name == "floor" else None
            poly = quotients[0] if quotients else self.arithmetic.ceiling(x, d) if name == "ceiling" else None
        elif name in ("FloorDiv", "CleanDiv", "Mod", "PythonMod"):
            quotients = self.arithmetic.divide(*map(self, size.args))
            poly = quotients and quotients["Mod" in name]
            if poly is None and "Mod" in name:
                poly = self._remainder(*map(self, size.args))
        if poly is None:
            raise NoSize(f"{size}")
        return poly

    def _remainder(self, a: Poly, b: Poly) -> Poly | None:
        """Of a remainder by a positive size nothing is known but that it is below it."""
        if not self.world.holds(b - 1):
            return None
        name = f"({self.world.atoms.text(a)}) % ({self.world.atoms.text(b)})"
        return self.world.atom(name, lambda s, _: int(value_at(a, s)) % int(value_at(b, s)), 0, b - 1)

    # ------------------------------------------------------------------ guards
    def assume(self, guard: sympy.Basic) -> None:
        """Take a condition as true; one that is not understood says nothing."""
        if isinstance(guard, sympy.And):
            for part in guard.args:
                self.assume(part)
        if not isinstance(guard, (sympy.Eq, sympy.Gt, sympy.Ge, sympy.Lt, sympy.Le)):
            return
        try:
            self._assume(guard)
        except NoSize:
            return

    def _assume(self, guard: sympy.core.relational.Relational) -> None:
        if isinstance(guard, sympy.Eq):
            if (multiple := _multiple(guard)) is not None:
                size, number = self(multiple[0]), multiple[1]
                self.world.multiples.append((size, number))
                self.world.atoms.keep_samples(lambda s: value_at(size, s) % number == 0)
            else:
                difference = self(guard.lhs - guard.rhs)
                self.world.atoms.assume(difference)
                self.world.atoms.assume(-difference)
            return
        difference = self(guard.gts - guard.lts)
        self.world.atoms.assume(difference - (1 if isinstance(guard, (sympy.Gt, sympy.Lt)) else 0))

    def is_multiple(self, size: Poly, of: int) -> bool:
        return any(size in (x, -x) and n % of == 0 for x, n in self.world.multiples)


def _shares(
    dimensions: Iterable[Size], guards: Iterable[sympy.Basic]
) -> dict[sympy.Symbol, tuple[sympy.Symbol, int]]:
    """H: (K, n) of symbols that are a multiple of n * K: a dimension is H / K, and Mod(H / K, n) == 0."""
    whole = [*_multiples(dimensions, guards), *(d for g in guards if (d := _divided(g)) is not None)]
    shares: dict[sympy.Symbol, tuple[sympy.Symbol, int]] = {}
    for size, multiple in whole:
        if (share := _share(size, multiple)) is not None:
            symbol, of, number = share
            known, n = shares.get(symbol, (of, 1))
            shares[symbol] = of, math.lcm(number, n) if known == of else number
    return {symbol: share for symbol, share in shares.items() if share[0] not in shares}


def _share(size: Size, multiple: int) -> tuple[sympy.Symbol, sympy.Symbol, int] | None:
    """H / (2 * K) is a multiple of 3  ->  (H, K, 6)"""
    slope, quotient = sympy.sympify(size).as_coeff_Mul()
    over, under = quotient.as_numer_denom()
    if not over.is_Symbol or not under.is_Symbol or not slope.is_Rational or not slope:
        return None
    number = multiple / Fraction(int(slope.p), int(slope.q))
    return (over, under, int(number)) if number.denominator == 1 else None


def _divisors(dimensions: Iterable[Size], guards: Iterable[sympy.Basic]) -> dict[sympy.Symbol, tuple[int, int]]:
    """(divisor, remainder) of symbols: a dimension is s0 / 32, or Mod(s0 + 15, 16) == 0."""
    divisors: dict[sympy.Symbol, tuple[int, int]] = {}
    for size, multiple in _multiples(dimensions, guards):
        if not isinstance(size, sympy.Basic) or (line := _line(size)) is None:
            continue
        symbol, slope, constant = line
        if (own := _remainder(slope, constant, multiple)) is not None:
            divisors[symbol] = _both(divisors.get(symbol, (1, 0)), own)
    return divisors


def _multiples(dimensions: Iterable[Size], guards: Iterable[sympy.Basic]) -> list[tuple[Size, int]]:
    """Sizes, and what they are multiples of: dimensions are integers."""
    return [*((size, 1) for size in dimensions), *(m for g in guards if (m := _multiple(g)) is not None)]


def _line(size: sympy.Expr) -> tuple[sympy.Symbol, Fraction, Fraction] | None:
    """slope * symbol + constant"""
    constant, product = size.as_coeff_Add()
    slope, symbol = product.as_coeff_Mul()
    if not symbol.is_Symbol or not slope.is_Rational or not constant.is_Rational:
        return None
    return symbol, Fraction(int(slope.p), int(slope.q)), Fraction(int(constant.p), int(constant.q))


def _remainder(slope: Fraction, constant: Fraction, multiple: int) -> tuple[int, int] | None:
    """slope * s + constant is a multiple  ->  (n, r) with s == r modulo n"""
    common = math.lcm(slope.denominator, constant.denominator)
    a, b, n = int(slope * common), int(constant * common), int(multiple) * common
    shared = math.gcd(a, n)
    if b % shared:
        return None
    n //= shared
    return n, -(b // shared) * pow(a // shared, -1, n) % n if n > 1 else 0


def _both(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """Both remainders as one; the first where there is no such number."""
    n = math.lcm(a[0], b[0])
    return next(((n, r) for r in range(a[1], n, a[0]) if r % b[0] == b[1]), a)


def _multiple(guard: sympy.Basic) -> tuple[sympy.Expr, int] | None:
    """Mod(s0, 16) == 0, 2 * Mod(s0, 8) == 0  ->  (s0, 16), (s0, 8)"""
    if not isinstance(guard, sympy.Eq) or guard.rhs != 0:
        return None
    _, mod = guard.lhs.as_coeff_Mul()
    return (mod.args[0], int(mod.args[1])) if isinstance(mod, sympy.Mod) and mod.args[1].is_Integer else None


def _divided(guard: sympy.Basic) -> tuple[sympy.Expr, int] | None:
    """Mod(H, K) == 0  ->  (H / K, 1)"""
    if not isinstance(guard, sympy.Eq) or guard.rhs != 0 or not isinstance(guard.lhs, sympy.Mod):
        return None
    size, by = guard.lhs.args
    return (size / by, 1) if by.free_symbols else None


SCALES = ((4096, 5000), (4096, 5000), (1, 5000), (16, 16), (4, 4), (1, 12))
"""Of the sizes in one sample: what most are multiples of, and how many times at most."""


def _draw_size(sample: Sample, random: Random) -> int:
    """A size: in one sample many are multiples of much, in another one all are small; few are huge."""
    if -1 not in sample:
        sample[-1], sample[-2] = random.choice(SCALES)
    unit, most, kind = sample[-1], sample[-2], random.random()
    if kind < 0.3:
        return random.choice((unit, unit, 1)) * random.choice((1, 1, 2, 3))
    if kind < 0.9 or most < SCALES[0][1]:
        return unit * random.randint(1, most)
    return unit * (random.randint(2**28, 2**33) // unit)
