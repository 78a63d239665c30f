"""Relations between sizes that follow from others: an exported file asks for what is left.

    K % G == 0, K == 4 * G, L * G * (K // G) >= 2, ..      becomes      K == 4 * G

Sizes are whole and have a least value. What is equal to others is put in their place, a size that another divides is a
multiple of it; then a difference of both sides is a polynomial, and has no negative coefficient once each size is
written as its least value and what it is larger by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy

Least = Mapping[sympy.Symbol, int]


class Facts:
    """What is known of sizes: their least values, and relations that were asked for."""

    def __init__(self, least: Least) -> None:
        self.least = dict(least)
        self.instead: dict[sympy.Symbol, Any] = {}

    def copy(self) -> Facts:
        """The same, to learn more."""
        found = Facts(self.least)
        found.instead = dict(self.instead)
        return found

    # ------------------------------------------------------------------ learning
    def needed(self, conditions: Iterable[Any]) -> list[Any]:
        """The conditions in their order, without those that follow from the others."""
        every = list(dict.fromkeys(conditions))
        chosen = [c for c in sorted(every, key=_rank) if not self.implies(c) and self._learned(c)]
        return [c for c in every if c in chosen]

    def _learned(self, condition: Any) -> bool:
        """Note what a condition says of single sizes."""
        if isinstance(condition, sympy.Eq):
            self._learn_equality(condition)
        elif isinstance(condition, sympy.Ne):
            self._learn_difference(condition)
        return True

    def _learn_equality(self, equality: sympy.Eq) -> None:
        left, right = equality.args
        if left.is_Symbol and left not in self.instead and not self._mentions(right, left):
            self._replace(left, right)
        elif type(left).__name__ == "Mod" and right == 0:
            self._learn_multiple(*left.args)

    def _learn_multiple(self, whole: Any, part: Any) -> None:
        """A size that another divides is a multiple of it, and not of zero."""
        if whole.is_Symbol and whole not in self.instead and not self._mentions(part, whole):
            times = sympy.Symbol(f"{whole}_by_{part}", integer=True, positive=True)
            self.least[times] = 1
            self._replace(whole, times * part)

    def _mentions(self, expression: Any, symbol: sympy.Symbol) -> bool:
        return symbol in self.put_in(expression).free_symbols

    def _replace(self, symbol: sympy.Symbol, by: Any) -> None:
        by = self.put_in(by)
        self.instead = {s: e.xreplace({symbol: by}) for s, e in self.instead.items()} | {symbol: by}

    def _learn_difference(self, unlike: sympy.Ne) -> None:
        """x != its least value: it is larger."""
        difference = sympy.factor_list(sympy.expand(self.put_in(unlike.lhs - unlike.rhs)))[1]
        for factor, _ in difference:
            symbols = factor.free_symbols
            if len(symbols) == 1 and (symbol := next(iter(symbols))) in self.least:
                if sympy.expand(factor - (symbol - self.least[symbol])) == 0:
                    self.least[symbol] += 1

    # ------------------------------------------------------------------ asking
    def put_in(self, expression: Any) -> Any:
        """The expression with what is known in the place of sizes, quotients and extremes settled."""
        done = sympy.sympify(expression).xreplace(self.instead)
        return done.replace(lambda e: type(e).__name__ in SETTLED, lambda e: SETTLED[type(e).__name__](self, e))

    def implies(self, condition: Any) -> bool:
        """True where the condition holds whatever else the sizes are."""
        if condition == sympy.true:
            return True
        if isinstance(condition, sympy.And | sympy.Or):
            return (all if isinstance(condition, sympy.And) else any)(map(self.implies, condition.args))
        if type(condition) not in PROVED:
            return False
        left, right = (self.put_in(a) for a in condition.args)
        return bool(PROVED[type(condition)](self, left, right))

    def is_at_least(self, left: Any, right: Any) -> bool:
        """left >= right: each size as its least value and the rest, no coefficient of the difference is negative."""
        difference = sympy.expand(left - right)
        symbols = difference.free_symbols
        if not symbols <= self.least.keys() or not difference.is_polynomial(*symbols):
            return False
        rests = {s: s + n for s, n in self.least.items() if s in symbols}
        moved = sympy.expand(difference.subs(rests, simultaneous=True))
        coefficients = sympy.Poly(moved, *symbols).coeffs() if symbols else [moved]
        return all(c >= 0 for c in coefficients)

    def is_equal(self, left: Any, right: Any) -> bool:
        return bool(sympy.expand(left - right) == 0)

    def is_unlike(self, left: Any, right: Any) -> bool:
        """x % y != 0 where x is smaller than y and not zero; else one is larger."""
        if type(left).__name__ == "Mod" and right == 0:
            part, whole = left.args
            return self.is_at_least(whole, part + 1) and self.is_at_least(part, 1)
        return self.is_at_least(left, right + 1) or self.is_at_least(right, left + 1)


def _rank(condition: Any) -> tuple[int, int]:
    """What says most of single sizes first: x == .., x % y == 0 of large numbers first, x != y; then short ones."""
    size = condition.count_ops() if isinstance(condition, sympy.Basic) else 0
    if isinstance(condition, sympy.Eq) and condition.lhs.is_Symbol:
        return 0, size
    if isinstance(condition, sympy.Eq) and type(condition.lhs).__name__ == "Mod":
        divisor = condition.lhs.args[1]
        return 1, -int(divisor) if divisor.is_Integer else 0
    return 2, size


def _quotient(facts: Facts, e: Any) -> Any:
    """x // y, where y divides x."""
    return ratio if (ratio := _ratio(*e.args)) is not None else e


def _remainder(facts: Facts, e: Any) -> Any:
    return sympy.Integer(0) if _ratio(*e.args) is not None else e


def _ratio(whole: Any, part: Any) -> Any | None:
    """A polynomial with whole coefficients that `part` times it is; None where there is none."""
    ratio = sympy.cancel(whole / part)
    numerator, denominator = sympy.fraction(ratio)
    return ratio if denominator == 1 and numerator.is_polynomial(*numerator.free_symbols) else None


def _largest(facts: Facts, e: Any) -> Any:
    """The one that is as large as all others."""
    return next((a for a in e.args if all(facts.is_at_least(a, b) for b in e.args)), e)


Proof = Callable[[Facts, Any, Any], bool]
SETTLED: dict[str, Callable[[Facts, Any], Any]] = {"FloorDiv": _quotient, "Mod": _remainder, "Max": _largest}
PROVED: dict[Any, Proof] = {
    sympy.Eq: Facts.is_equal,
    sympy.Ne: Facts.is_unlike,
    sympy.Ge: Facts.is_at_least,
    sympy.Le: lambda facts, x, y: facts.is_at_least(y, x),
    sympy.Gt: lambda facts, x, y: facts.is_at_least(x, y + 1),
    sympy.Lt: lambda facts, x, y: facts.is_at_least(y, x + 1),
}


