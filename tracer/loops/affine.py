"""Numbers of a loop as functions of its step and its length: coefficients from two lengths, for a third to check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from .reasons import NotRolled

ONE = sympy.Integer(1)
Number = Mapping[Any, int]
"""A number as a sum: term -> its coefficient; the term 1 is for what is no symbol."""
Sample = tuple[int, int]
"""(step, length)"""


@dataclass(frozen=True)
class Affine:
    """step * t + length * L + constant"""

    step: int = 0
    length: int = 0
    constant: int = 0

    def at(self, t: int, length: int) -> int:
        return self.step * t + self.length * length + self.constant

    def after(self, t: Affine) -> Affine:
        """The same where the step is a function of the length, and of another loop's step."""
        length, constant = self.length + self.step * t.length, self.constant + self.step * t.constant
        return Affine(self.step * t.step, length, constant)


def number_of(value: Any) -> Number:
    """5 -> {1: 5}, s0 * s1 - 3 -> {s0 * s1: 1, 1: -3}"""
    if isinstance(value, int):
        return {ONE: value} if value else {}
    terms = sympy.expand(value.node.expr).as_coefficients_dict()
    if any(not c.is_Integer for c in terms.values()):
        return {value.node.expr: 1}
    return {term: int(c) for term, c in terms.items() if c}


def fitted(samples: Mapping[Sample, int]) -> Affine | None:
    """The affine function with these values; None if there is none."""
    (t0, l0), first = next(iter(samples.items()))
    step = next((v - first for (t, n), v in samples.items() if (t, n) == (t0 + 1, l0)), 0)
    other = next(((n, v - step * (t - t0)) for (t, n), v in samples.items() if n != l0), (l0, first))
    length, rest = divmod(other[1] - first, other[0] - l0) if other[0] != l0 else (0, 0)
    found = Affine(step, length, first - step * t0 - length * l0)
    return None if rest or any(found.at(*sample) != v for sample, v in samples.items()) else found


@dataclass(frozen=True)
class Fit:
    """A number of a loop: each term with its coefficient."""

    terms: tuple[tuple[Any, Affine], ...]

    def at(self, t: int, length: int) -> Number:
        values = {term: affine.at(t, length) for term, affine in self.terms}
        return {term: value for term, value in values.items() if value}


def fit(samples: Mapping[Sample, Number]) -> Fit | None:
    """The function that takes these values; None if no affine one does."""
    terms = sorted({term for number in samples.values() for term in number}, key=str)
    found = {term: fitted({s: number.get(term, 0) for s, number in samples.items()}) for term in terms}
    if any(affine is None for affine in found.values()):
        return None
    return Fit(tuple((term, affine) for term, affine in found.items() if affine is not None))


def fit_lengths(values: Sequence[Number], lengths: Sequence[int]) -> Fit:
    """The function of the length alone; raises NotRolled where it is none that is affine."""
    found = fit({(0, n): value for n, value in zip(lengths, values, strict=True)})
    if found is None:
        raise NotRolled("a number is no affine function of the length of the loop")
    return found


def is_symbolic(value: Any) -> bool:
    """True for numbers that are no whole numbers, and made of sizes."""
    return isinstance(value, torch.SymFloat | torch.SymBool)
