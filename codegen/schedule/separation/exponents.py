"""Whether a sum may be relative to an extreme that still moves: no power on the way may exceed what eager makes of it.

A row's maximum so far is less than the row's: `exp(x - m)` may overflow beside the one and not beside the other. Where
x is at most what the maximum is of, neither is above one. For a minimum the same holds of `exp(m - x)`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ....ir.types import FLOATS
from ...program.axes import Term
from .algebra import POWERS, Test, is_infinite, moving, summands

Parts = Counter[tuple[int, Term]]
ABOUT_INFINITY = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "abs", "not", "and", "or"))
"""What a question is made of that tells what is finite from what is not."""
BOUND = {"amax": -1, "amin": 1}
"""The sign with which an extreme bounds an exponent that it is added to."""
OF_TWO = {-1: "max", 1: "min"}


@dataclass(frozen=True)
class Exponents:
    """running: extremes along the stream; moved: what reads them; fixed: what is the same at every place of it."""

    running: frozenset[Term]
    moved: frozenset[Term]
    fixed: Test

    @classmethod
    def of(cls, body: Term, running: frozenset[Term], fixed: Test) -> Exponents:
        """The exponents below a body."""
        return cls(running, moving(body, running), fixed)

    def are_bounded(self, term: Term) -> bool:
        """No power in it that reads a running value can exceed a number that is the same for all of the row."""
        if term.op in POWERS and self.moves(term):
            return self.is_bounded(term.args[0])
        if term.op == "div" and self.moves(term.args[1]):
            return False
        return not self.moves(term) or term in self.running or all(map(self.are_bounded, term.args))

    def moves(self, term: Term) -> bool:
        """True for what reads a running value."""
        return term in self.moved

    def is_bounded(self, exponent: Term) -> bool:
        """exponent <= a number that is the same for all of the row"""
        exponent = bare(exponent)
        if (factor := self.scaled(exponent)) is not None:
            return self.is_bounded(factor)
        if exponent.op == "where" and not self.moves(exponent.args[0]):
            return all(is_infinite(a) or self.is_bounded(a) for a in exponent.args[1:])
        moving = [(sign, part) for sign, part in summands(exponent) if self.moves(part)]
        return len(moving) == 1 and self.is_within(self.parts_of(exponent), *moving[0])

    def scaled(self, term: Term) -> Term | None:
        """x of x * c and of x / c, where c does not move. Its sign is all the same: with the other one, it is the
        extreme so far that has the smaller power."""
        if term.op not in ("mul", "div"):
            return None
        moving = [a for a in term.args if self.moves(a)]
        return moving[0] if len(moving) == 1 and (term.op == "mul" or moving[0] is term.args[0]) else None

    def parts_of(self, term: Term) -> Parts:
        """What a sum adds up, but for what is the same for all of the row, or moves."""
        parts = ((sign, bare(part)) for sign, part in summands(bare(term)))
        return Counter(p for p in parts if not self.fixed(p[1]) and not self.moves(p[1]))

    def is_within(self, parts: Parts, sign: int, bound: Term) -> bool:
        """The parts and the bound, with this sign, are at most zero: it is an extreme of what they add up to."""
        bound = bare(bound)
        if bound in self.running:
            return BOUND.get(bound.op) == sign and self._is_of(parts, sign, bound.args[0])
        if bound.op == OF_TWO[sign]:
            return any(self.is_within(parts, sign, a) for a in bound.args if self.moves(a))
        if bound.op == "where" and self._is_about_infinity(bound.args[0]):
            return any(self.is_within(parts, sign, a) for a in bound.args[1:] if self.moves(a))
        if bound.op == "neg":
            return self.is_within(parts, -sign, bound.args[0])
        factor = self.scaled(bound)
        return factor is not None and self._is_scaled_within(parts, sign, bound, factor)

    def is_extreme(self, bound: Term) -> bool:
        """It is an extreme itself, or that wherever it is finite; the larger one of it and another number is not."""
        bound = bare(bound)
        if bound.op == "where" and self._is_about_infinity(bound.args[0]):
            return all(self.is_extreme(a) for a in bound.args[1:] if self.moves(a))
        return bound in self.running

    def _is_scaled_within(self, parts: Parts, sign: int, bound: Term, factor: Term) -> bool:
        """x * c beside an extreme of x, times c."""
        lone = self._lone(parts)
        if lone is None or lone[1].op != bound.op:
            return False
        by = [a for a in bound.args if a is not factor]
        others = list(lone[1].args)
        if len(by) != 1 or by[0] not in others or (bound.op == "div" and others[1] is not by[0]):
            return False
        others.remove(by[0])
        return self.is_within(self._signed(lone[0], others[0]), sign, factor)

    def _is_of(self, parts: Parts, sign: int, reduced: Term) -> bool:
        """The parts add up to what an extreme is of; where a mask takes some of that away, to what is left."""
        whole = self.parts_of(reduced)
        if parts == Counter({(-sign * s, part): n for (s, part), n in whole.items()}):
            return True
        lone = self._lone(parts)
        if lone is None or lone[1].op != "where":
            return False
        sides = (a for a in lone[1].args[1:] if not is_infinite(a))
        return all(self._is_of(self._signed(lone[0], a), sign, reduced) for a in sides)

    def _signed(self, sign: int, term: Term) -> Parts:
        return Counter({(sign * s, part): n for (s, part), n in self.parts_of(term).items()})

    def _lone(self, parts: Parts) -> tuple[int, Term] | None:
        """The part, if it is one."""
        return next(iter(parts)) if parts.total() == 1 else None

    def _is_about_infinity(self, question: Term) -> bool:
        if question.op in ABOUT_INFINITY:
            return all(map(self._is_about_infinity, question.args))
        return is_infinite(question) or self.moves(question)


def bare(term: Term) -> Term:
    """The value that is rounded."""
    while term.op == "cast" and term.dtype in FLOATS and term.args[0].dtype in FLOATS:
        (term,) = term.args
    return term
