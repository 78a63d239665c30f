"""Polynomials in integer atoms, exactly: what sizes, places and addresses are while they are reasoned about.

Atoms are numbered; a higher number was made later and may be bounded by lower ones, never the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from math import gcd
from typing import TypeAlias

Monomial: TypeAlias = "tuple[int, ...]"
Coefficient: TypeAlias = "int | Fraction"
TERMS = 400
"""Longer polynomials are not formed: what needs them is not proved."""
LARGEST = 2**256
"""Sizes and offsets have 64 bits, few of them are multiplied: a search with greater coefficients goes in circles."""


class TooLong(Exception):
    """A polynomial has more terms than anybody wants to read."""


class Poly:
    """sum of coefficient * product of atoms; immutable, without zero coefficients."""

    __slots__ = ("_key", "terms")

    def __init__(self, terms: dict[Monomial, Coefficient]) -> None:
        self.terms = terms
        self._key: frozenset[tuple[Monomial, Coefficient]] | None = None

    @staticmethod
    def of(value: int | Poly) -> Poly:
        if isinstance(value, Poly):
            return value
        return Poly({(): value}) if value else ZERO

    @staticmethod
    def atom(number: int) -> Poly:
        return Poly({(number,): 1})

    # ------------------------------------------------------------------ identity
    @property
    def key(self) -> frozenset[tuple[Monomial, Coefficient]]:
        if self._key is None:
            self._key = frozenset(self.terms.items())
        return self._key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Poly) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def is_readable(self) -> bool:
        """Whether its coefficients are such as a proof may have."""
        return all(-LARGEST < c < LARGEST for c in self.terms.values())

    # ------------------------------------------------------------------ arithmetic
    def __add__(self, other: Poly | int) -> Poly:
        terms = dict(self.terms)
        for monomial, c in Poly.of(other).terms.items():
            if total := terms.get(monomial, 0) + c:
                terms[monomial] = total
            else:
                del terms[monomial]
        return Poly(terms)

    def __neg__(self) -> Poly:
        return Poly({m: -c for m, c in self.terms.items()})

    def __sub__(self, other: Poly | int) -> Poly:
        return self + -Poly.of(other)

    def __mul__(self, other: Poly | int) -> Poly:
        if isinstance(other, int):
            return Poly({m: c * other for m, c in self.terms.items()}) if other else ZERO
        if len(other.terms) * len(self.terms) > TERMS:
            raise TooLong
        terms: dict[Monomial, Coefficient] = {}
        for m, c in self.terms.items():
            for n, d in other.terms.items():
                both = tuple(sorted(m + n)) if m and n else m or n
                terms[both] = terms.get(both, 0) + c * d
        return Poly({m: c for m, c in terms.items() if c})

    def over(self, divisor: int) -> Poly:
        """self / divisor, term by term."""
        return Poly({m: _whole(Fraction(c) / divisor) for m, c in self.terms.items()})

    # ------------------------------------------------------------------ parts
    @property
    def constant(self) -> Coefficient:
        return self.terms.get((), 0)

    @property
    def number(self) -> Coefficient | None:
        """The value, where no atom decides it."""
        return self.constant if len(self.terms) <= 1 and (not self.terms or () in self.terms) else None

    @property
    def atoms(self) -> set[int]:
        return {a for m in self.terms for a in m}

    @property
    def top(self) -> int:
        """The last atom; the polynomial has one."""
        return max(m[-1] for m in self.terms if m)

    @property
    def integral(self) -> bool:
        return all(isinstance(c, int) for c in self.terms.values())

    def linear(self, atom: int) -> tuple[Poly, Poly] | None:
        """self == c * atom + rest  ->  (c, rest), with neither of which the atom is in."""
        factor: dict[Monomial, Coefficient] = {}
        rest: dict[Monomial, Coefficient] = {}
        for m, c in self.terms.items():
            if atom not in m:
                rest[m] = c
            elif m.count(atom) == 1:
                factor[tuple(a for a in m if a != atom)] = c
            else:
                return None
        return Poly(factor), Poly(rest)

    def with_atom(self, atom: int, value: Poly) -> Poly:
        """The atom replaced by what it is."""
        result, rest, power = ZERO, dict[Monomial, Coefficient](), {0: ONE}
        for m, c in self.terms.items():
            n = m.count(atom)
            if not n:
                rest[m] = c
                continue
            for k in range(1, n + 1):
                power.setdefault(k, power[k - 1] * value if k - 1 in power else value)
            result = result + Poly({tuple(a for a in m if a != atom): c}) * power[n]
        return result + Poly(rest)

    def replaced(self, into: Mapping[int, Poly]) -> Poly:
        """Every atom replaced; those that are not mentioned stay."""
        result = self
        for atom, value in into.items():
            if atom in result.atoms:
                result = result.with_atom(atom, value)
        return result

    def content(self) -> int:
        """The largest integer that divides every coefficient but the constant one; 1 where one is no integer."""
        found = 0
        for m, c in self.terms.items():
            if not isinstance(c, int):
                return 1
            if m:
                found = gcd(found, c)
        return found or 1

    def common(self) -> Monomial:
        """Atoms that every term has; none where there is a constant."""
        monomials = iter(self.terms)
        shared = list(next(monomials, ()))
        for m in monomials:
            if not shared:
                break
            left = list(m)
            shared = [a for a in shared if a in left and not left.remove(a)]  # type: ignore[func-returns-value]
        return tuple(shared)

    def without(self, monomial: Monomial) -> Poly:
        """self / monomial, which is in every term."""
        return Poly({_less(m, monomial): c for m, c in self.terms.items()})

    def divided(self, by: Poly) -> Poly | None:
        """self / by where that is a polynomial with integer coefficients, else None."""
        if (n := by.number) is not None:
            divisible = n and all(Fraction(c) % n == 0 for c in self.terms.values())
            return Poly({m: _whole(Fraction(c) / n) for m, c in self.terms.items()}) if divisible else None
        lead = max(by.terms, key=_rank)
        quotient, rest = ZERO, self
        for _ in range(8):
            if not rest.terms:
                return quotient
            first = max(rest.terms, key=_rank)
            c = Fraction(rest.terms[first]) / by.terms[lead]
            if c.denominator != 1 or not _contains(first, lead):
                return None
            step = Poly({_less(first, lead): int(c)})
            quotient, rest = quotient + step, rest - step * by
        return None

    def evaluated(self, value: Callable[[int], int]) -> Coefficient:
        total: Coefficient = 0
        for m, c in self.terms.items():
            for a in m:
                c = c * value(a)
            total += c
        return total

    def text(self, names: Callable[[int], str]) -> str:
        parts = [_term(c, [names(a) for a in m]) for m, c in sorted(self.terms.items(), key=lambda t: _rank(t[0]))]
        return " + ".join(parts[::-1]).replace("+ -", "- ") or "0"

    def __repr__(self) -> str:
        return self.text(lambda a: f"a{a}")


ZERO, ONE = Poly({}), Poly({(): 1})


def _whole(c: Fraction) -> Coefficient:
    return int(c) if c.denominator == 1 else c


def _rank(m: Monomial) -> tuple[int, Monomial]:
    return len(m), m


def _contains(m: Monomial, part: Monomial) -> bool:
    return all(m.count(a) >= part.count(a) for a in part)


def _less(m: Monomial, part: Monomial) -> Monomial:
    left = list(m)
    for a in part:
        left.remove(a)
    return tuple(left)


def _term(c: Coefficient, names: Iterable[str]) -> str:
    names = list(names)
    if not names:
        return str(c)
    sign = "" if c == 1 else "-" if c == -1 else f"{c}*"
    return sign + "*".join(names)


def parts(poly: Poly) -> Iterator[tuple[Poly, Coefficient]]:
    """Its monomials as polynomials, each with its coefficient."""
    for m, c in poly.terms.items():
        yield Poly({m: 1}), c
