"""Polynomials in integer atoms, exactly: sizes, places and addresses while they are reasoned about.

Atoms are numbered; a higher number was made later and may be bounded by lower ones, never the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from math import gcd
from typing import TypeAlias

Monomial: TypeAlias = "tuple[int, ...]"
Coefficient: TypeAlias = "int | Fraction"
Sample: TypeAlias = "dict[int, int]"
TERMS = 400
"""Longer polynomials are not formed: what needs them is not proved."""


class TooLong(Exception):
    """A product has more terms than a polynomial may have."""


class Poly:
    """sum of coefficient * product of atoms; immutable, without zero coefficients."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: dict[Monomial, Coefficient]) -> None:
        self.terms = terms
        self._hash: int | None = None

    @staticmethod
    def of(value: int | Poly) -> Poly:
        if isinstance(value, Poly):
            return value
        return Poly({(): value}) if value else ZERO

    @staticmethod
    def atom(number: int) -> Poly:
        return Poly({(number,): 1})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Poly) and self.terms == other.terms

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.terms.items()))
        return self._hash

    def __repr__(self) -> str:
        return text(self, lambda a: f"a{a}")

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

    # ------------------------------------------------------------------ parts
    @property
    def number(self) -> Coefficient | None:
        """The value, where no atom decides it."""
        return self.terms.get((), 0) if len(self.terms) <= 1 and (not self.terms or () in self.terms) else None

    @property
    def atoms(self) -> set[int]:
        return {a for m in self.terms for a in m}

    @property
    def top(self) -> int:
        """The last atom; the polynomial has one."""
        return max(m[-1] for m in self.terms if m)

    def linear(self, atom: int) -> tuple[Poly, Poly] | None:
        """self == c * atom + remainder  ->  (c, remainder), with neither of which the atom is in."""
        factor: dict[Monomial, Coefficient] = {}
        remainder: dict[Monomial, Coefficient] = {}
        for m, c in self.terms.items():
            if atom not in m:
                remainder[m] = c
            elif m.count(atom) == 1:
                factor[tuple(a for a in m if a != atom)] = c
            else:
                return None
        return Poly(factor), Poly(remainder)

    def with_atom(self, atom: int, value: Poly) -> Poly:
        """The polynomial with `value` in place of the atom."""
        result, untouched, power = ZERO, dict[Monomial, Coefficient](), {0: ONE}
        for m, c in self.terms.items():
            n = m.count(atom)
            if not n:
                untouched[m] = c
                continue
            for k in range(1, n + 1):
                power.setdefault(k, power[k - 1] * value if k - 1 in power else value)
            result = result + Poly({tuple(a for a in m if a != atom): c}) * power[n]
        return result + Poly(untouched)


ZERO, ONE = Poly({}), Poly({(): 1})


# ------------------------------------------------------------------ values and text
def value_at(poly: Poly, sample: Mapping[int, int]) -> Coefficient:
    """The value where each atom has the sample's."""
    total: Coefficient = 0
    for m, c in poly.terms.items():
        for a in m:
            c = c * sample[a]
        total += c
    return total


def text(poly: Poly, name: Callable[[int], str]) -> str:
    parts = [_term(c, [name(a) for a in m]) for m, c in sorted(poly.terms.items(), key=lambda t: _rank(t[0]))]
    return " + ".join(parts[::-1]).replace("+ -", "- ") or "0"


def _term(c: Coefficient, names: Iterable[str]) -> str:
    names = list(names)
    if not names:
        return str(c)
    sign = "" if c == 1 else "-" if c == -1 else f"{c}*"
    return sign + "*".join(names)


# ------------------------------------------------------------------ division
def is_integral(poly: Poly) -> bool:
    return all(isinstance(c, int) for c in poly.terms.values())


def divide_terms(poly: Poly, divisor: Coefficient) -> Poly:
    """poly / divisor, term by term; whole coefficients as integers."""
    return Poly({m: _whole(Fraction(c) / divisor) for m, c in poly.terms.items()})


def exact_quotient(poly: Poly, divisor: Poly) -> Poly | None:
    """poly / divisor where that is a polynomial with integer coefficients, else None."""
    if (n := divisor.number) is not None:
        divisible = n and all(Fraction(c) % n == 0 for c in poly.terms.values())
        return divide_terms(poly, n) if divisible else None
    # Long division by leading terms; a few steps, since quotients that sizes make are short.
    lead = max(divisor.terms, key=_rank)
    quotient, remainder = ZERO, poly
    for _ in range(8):
        if not remainder.terms:
            return quotient
        first = max(remainder.terms, key=_rank)
        c = Fraction(remainder.terms[first]) / divisor.terms[lead]
        if c.denominator != 1 or not contains(first, lead):
            return None
        step = Poly({without(first, lead): int(c)})
        quotient, remainder = quotient + step, remainder - step * divisor
    return None


def content(poly: Poly) -> int:
    """The largest integer that divides every coefficient but the constant one; 1 where one is no integer."""
    divisor = 0
    for m, c in poly.terms.items():
        if not isinstance(c, int):
            return 1
        if m:
            divisor = gcd(divisor, c)
    return divisor or 1


def common_atoms(poly: Poly) -> Monomial:
    """Atoms that every term has; none where there is a constant."""
    monomials = iter(poly.terms)
    shared = list(next(monomials, ()))
    for m in monomials:
        if not shared:
            break
        unmatched = list(m)
        shared = [a for a in shared if a in unmatched and not unmatched.remove(a)]  # type: ignore[func-returns-value]
    return tuple(shared)


def divide_by_atoms(poly: Poly, monomial: Monomial) -> Poly:
    """poly / monomial, which is in every term."""
    return Poly({without(m, monomial): c for m, c in poly.terms.items()})


def _whole(c: Fraction) -> Coefficient:
    return int(c) if c.denominator == 1 else c


def _rank(m: Monomial) -> tuple[int, Monomial]:
    return len(m), m


def contains(m: Monomial, part: Monomial) -> bool:
    return all(m.count(a) >= part.count(a) for a in part)


def without(m: Monomial, part: Monomial) -> Monomial:
    atoms = list(m)
    for a in part:
        atoms.remove(a)
    return tuple(atoms)
