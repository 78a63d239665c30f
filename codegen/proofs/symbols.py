"""Sizes as polynomials: the symbols of a capture, and what a kernel's guards say about them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import reduce
from random import Random

import sympy

from ...ir.types import Size
from .bounds import Sample, World, at
from .polynomials import ONE, ZERO, Poly


class NoSize(Exception):
    """An expression that is read as no size."""


class Sizes:
    """Reads sympy expressions. A symbol of which a part is a size, C / 32, is 32 times an atom."""

    def __init__(
        self,
        world: World,
        pinned: Mapping[sympy.Symbol, int],
        dimensions: Iterable[Size],
        guards: Iterable[sympy.Basic] = (),
    ) -> None:
        self.world = world
        self.pinned = dict(pinned)
        self.symbols: dict[sympy.Symbol, Poly] = {}
        self._known: dict[sympy.Basic, Poly] = {}
        self._wholes: dict[Poly, Poly] = {}
        dimensions = [*dimensions]
        self._parts = _parts(dimensions, guards)
        self._natural = {n for n in dimensions if isinstance(n, sympy.Symbol)}  # sizes of tensors, whatever is said
        self.multiples: list[tuple[Poly, int]] = []  # sizes that are multiples, by the guards

    def __call__(self, size: Size) -> Poly:
        if isinstance(size, int):
            return Poly.of(size)
        if size not in self._known:
            self._known[size] = self._read(size)
        return self._known[size]

    def whole(self, size: Size) -> Poly:
        """A size that is an integer: of s0 * s1 / 4 nothing is known but that it is one, and four times it s0 * s1."""
        found = self(size)
        if found.integral or (found := found.over(1)).integral:
            return found
        if found not in self._wholes:
            number = math.lcm(*(Fraction(c).denominator for c in found.terms.values()))
            least = 0 if self.world.holds(found) else None
            made = self.world.atom(self.world.text(found), lambda s, _: int(at(found, s)), least)
            self.world.bound_below(made.top, Poly.of(number), (found * number).over(1))
            self.world.bound_above(made.top, Poly.of(number), (found * number).over(1))
            self._wholes[found] = made
        return self._wholes[found]

    def _read(self, size: sympy.Expr) -> Poly:
        if size.is_Integer:
            return Poly.of(int(size))
        if size.is_Rational:
            return Poly({(): Fraction(int(size.p), int(size.q))})
        if size.is_Symbol:
            return self._symbol(size)
        if size.is_Add:
            return reduce(lambda a, b: a + b, map(self, size.args), ZERO)
        if size.is_Mul:
            return reduce(lambda a, b: a * b, map(self, size.args), ONE)
        if size.is_Pow and size.exp.is_Integer and size.exp > 0:
            return reduce(lambda a, b: a * b, [self(size.base)] * int(size.exp), ONE)
        return self._function(size)

    def _symbol(self, symbol: sympy.Symbol) -> Poly:
        if symbol in self.pinned:
            return Poly.of(self.pinned[symbol])
        part, rest = self._parts.get(symbol, (1, 0))
        name = str(symbol) if part == 1 else f"{symbol}/{part}" if not rest else f"({symbol}-{rest})/{part}"
        least = (1 if rest == 0 else 0) if symbol.is_positive else self._least(symbol)
        self.symbols[symbol] = self.world.atom(name, _drawn, least) * part + rest
        return self.symbols[symbol]

    def _least(self, symbol: sympy.Symbol) -> int | None:
        return 0 if symbol in self._natural or symbol.is_nonnegative else None

    def _function(self, size: sympy.Expr) -> Poly:
        name = type(size).__name__
        if name in ("Min", "Max"):
            return reduce(lambda a, b: self.world.extremum(name.lower(), a, b), map(self, size.args))
        found = None
        if name in ("ceiling", "floor"):
            x, d = map(self, size.args[0].as_numer_denom())
            quotient = self.world.divided(x, d) if name == "floor" else None
            found = quotient[0] if quotient else self.world.ceiling(x, d) if name == "ceiling" else None
        elif name in ("FloorDiv", "CleanDiv", "Mod", "PythonMod"):
            divided = self.world.divided(*map(self, size.args))
            found = divided and divided["Mod" in name]
        if found is None:
            raise NoSize(f"{size}")
        return found

    # ------------------------------------------------------------------ guards
    def assume(self, guard: sympy.Basic) -> None:
        """What a condition says; one that is not understood says nothing."""
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
            if (found := _multiple(guard)) is not None:
                size, number = self(found[0]), found[1]
                self.multiples.append((size, number))
                self.world.known.samples = [s for s in self.world.samples if at(size, s) % number == 0]
            else:
                self._between(self(guard.lhs - guard.rhs))
            return
        difference = self(guard.gts - guard.lts)
        self.world.assume(difference - (1 if isinstance(guard, (sympy.Gt, sympy.Lt)) else 0))

    def _between(self, nothing: Poly) -> None:
        self.world.assume(nothing)
        self.world.assume(-nothing)

    def is_multiple(self, size: Poly, of: int) -> bool:
        return any(size == x and n % of == 0 for x, n in self.multiples)


def _parts(dimensions: Iterable[Size], guards: Iterable[sympy.Basic]) -> dict[sympy.Symbol, tuple[int, int]]:
    """What is known of a symbol's remainder, (divisor, remainder): a dimension is s0 / 32, Mod(s0 + 15, 16) == 0."""
    found: dict[sympy.Symbol, tuple[int, int]] = {}
    whole = [(size, 1) for size in dimensions] + [m for g in guards if (m := _multiple(g)) is not None]
    for size, multiple in whole:
        if not isinstance(size, sympy.Basic) or (line := _line(size)) is None:
            continue
        symbol, slope, constant = line
        if (known := _remainder(slope, constant, multiple)) is not None:
            found[symbol] = _both(found.get(symbol, (1, 0)), known)
    return found


def _line(size: sympy.Expr) -> tuple[sympy.Symbol, Fraction, Fraction] | None:
    """slope * symbol + constant"""
    constant, rest = size.as_coeff_Add()
    slope, symbol = rest.as_coeff_Mul()
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
    _, rest = guard.lhs.as_coeff_Mul()
    return (rest.args[0], int(rest.args[1])) if isinstance(rest, sympy.Mod) and rest.args[1].is_Integer else None


def _drawn(sample: Sample, random: Random) -> int:
    """A size: many are multiples of much, some are odd, few are huge."""
    unit = sample.setdefault(-1, random.choice((4096, 4096, 4096, 1, 1)))
    kind = random.random()
    if kind < 0.2:
        return unit * random.choice((1, 1, 2, 3))
    if kind < 0.9:
        return unit * random.randint(1, 5000)
    return unit * (random.randint(2**28, 2**33) // unit)
