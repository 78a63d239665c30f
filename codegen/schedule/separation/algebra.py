"""Algebra on terms: what leaves a sum, and the factor by which a sum moves when what it is relative to moves.

A sum over the stream reads a *running* value r, a reduction over the same stream. It is online where

    body(x, r) = P(r) * exp(G(r)) * rest(x)      sums          body(x, r) = G(r) + rest(x)      extremes

P leaves the sum; the sum so far is scaled by exp(G(new) - G(old)). Both are found by structural induction over the
operations; nothing here knows what a softmax is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from ....ir.types import FLOATS, LOW_FLOATS
from ...program.axes import Term, terms_below
from ...program.terms import TermTable

Test: TypeAlias = Callable[[Term], bool]
POWERS = ("exp", "exp2")
LOG2E = math.log2(math.e)


class Factor(NamedTuple):
    """by * exp(shift); None is 1, and 0. `base`: the operation that is the power, `exp` or `exp2`."""

    by: Term | None = None
    shift: Term | None = None
    base: str = "exp"


class Shift(NamedTuple):
    """What a value moves by; None is 0."""

    by: Term | None = None


ONE, ZERO = Factor(), Shift()


def is_number(term: Term) -> bool:
    return term.op == "const" and isinstance(term.param, (int, float)) and not isinstance(term.param, bool)


def is_one(term: Term) -> bool:
    return is_number(term) and term.param == 1


def is_infinite(term: Term) -> bool:
    return is_number(term) and math.isinf(term.param)


def source_of(term: Term) -> Term:
    """cast(x: bf16, f32)  ->  x: registers hold the same"""
    widens = term.op == "cast" and term.dtype == "f32" and term.args[0].dtype in LOW_FLOATS
    return term.args[0] if widens else term


def source_of_rounded(term: Term) -> Term:
    """What is below casts between floats."""
    while term.op == "cast" and term.args[0].dtype in FLOATS:
        (term,) = term.args
    return term


def is_tile_product(term: Term) -> bool:
    """sum(x * y) of a matrix product."""
    return term.op == "sum" and term.node is not None and term.node.prim == "dot" and term.args[0].op == "mul"


class Algebra:
    """The terms of one kernel. `fixed`: what is the same at every place of the streamed axes."""

    def __init__(self, table: TermTable, fixed: Test) -> None:
        self.table, self.fixed = table, fixed

    # ------------------------------------------------------------------ making
    def make(self, op: str, *args: Term, param: str | None = None) -> Term:
        """An operation of floats, kept in float32 or wider."""
        return self.table.make(op, *args, dtype="f64" if args[-1].dtype == "f64" else "f32", param=param)

    def number(self, value: float, like: Term) -> Term:
        return self.table.const(value, "f64" if like.dtype == "f64" else "f32")

    def again(self, term: Term, args: tuple[Term, ...]) -> Term:
        """The same operation of other arguments."""
        return self.table.again(term, args)

    def times(self, x: Term | None, y: Term | None) -> Term | None:
        """Their product; None is 1."""
        x, y = (None if t is None or is_one(t) else t for t in (x, y))
        return (x if y is None else y) if x is None or y is None else self.make("mul", x, y)

    def over(self, x: Term | None, y: Term | None, like: Term) -> Term | None:
        """Their quotient; None is 1."""
        return x if y is None else self.make("div", x if x is not None else self.number(1.0, like), y)

    def negated(self, x: Term | None) -> Term | None:
        return None if x is None else x.args[0] if x.op == "neg" else self.make("neg", x)

    def plus(self, x: Term | None, y: Term | None) -> Term | None:
        return (x if y is None else y) if x is None or y is None else self.make("add", x, y)

    def combined(self, op: str, x: Term, y: Term) -> Term:
        """x + y or x - y;  -x + y  ->  y - x"""
        return self.make("sub", y, x.args[0]) if (op, x.op) == ("add", "neg") else self.make(op, x, y)

    def difference(self, now: Term, then: Term) -> Term:
        """now - then of two terms that differ in what they are made of: what they share is not subtracted from itself.

        -m * 1.5 - -n * 1.5  ->  -((m - n) * 1.5)
        """
        shared = [a == b for a, b in zip(now.args, then.args, strict=True)] if now.op == then.op else []
        if now.op == "neg" and shared:
            (x,), (y,) = now.args, then.args
            return self.difference(y, x)
        if now.op in ("add", "sub", "mul") and True in shared:
            at = shared.index(False) if False in shared else 0
            x, y = (then, now) if now.op == "sub" and at == 1 else (now, then)
            moved = self.difference(x.args[at], y.args[at])
            return self.make("mul", moved, now.args[1 - at]) if now.op == "mul" else moved
        return self.make("sub", now, then)

    def rewritten(self, roots: Iterable[Term], rule: Callable[[Term, tuple[Term, ...]], Term]) -> dict[Term, Term]:
        """Every term below the roots, by a rule of the term and its new arguments."""
        new: dict[Term, Term] = {}
        for term in terms_below(roots):
            new[term] = rule(term, tuple(new[a] for a in term.args))
        return new

    def replaced(self, root: Term, values: Mapping[Term, Term]) -> Term:
        """The term with others in the place of some below it."""
        return self.table.replaced([root], values)[root]

    # ------------------------------------------------------------------ in float32
    def widened(self, term: Term, args: tuple[Term, ...]) -> Term:
        """The operation in float32: what a running sum is made of is not rounded on the way."""
        args = tuple(source_of(a) for a in args)
        if term.op == "cast" and term.dtype in FLOATS and args[0].dtype in FLOATS and term.dtype != "f64":
            return args[0]
        dtype = "f32" if term.dtype in LOW_FLOATS and term.op not in ("load", "const") else term.dtype
        if dtype == term.dtype:
            return self.again(term, args)
        return self.table.make(term.op, *args, dtype=dtype, param=term.param, node=term.node)

    # ------------------------------------------------------------------ out of a sum
    def split(self, term: Term) -> tuple[Term | None, Term | None]:
        """term = outside * inside, where outside is fixed; None is 1."""
        if self.fixed(term):
            return term, None
        rule = {"mul": self._split_product, "div": self._split_quotient, "neg": self._split_negation}.get(term.op)
        if term.dtype in FLOATS and rule is not None:
            return rule(term)
        return (None, term) if term.op != "exp" else self._split_power(term)

    def _split_product(self, term: Term) -> tuple[Term | None, Term | None]:
        (p, x), (q, y) = map(self.split, term.args)
        if p is None and q is None:
            return None, term
        inside = self.again(term, (x, y)) if x is not None and y is not None else x if y is None else y
        return self.times(p, q), inside

    def _split_quotient(self, term: Term) -> tuple[Term | None, Term | None]:
        (p, x), (q, y) = map(self.split, term.args)
        p, x = (None, p) if p is not None and is_one(p) and y is not None else (p, x)
        if p is None and q is None:
            return None, term
        return self.over(p, q, term), x if y is None else self.over(x, y, term)

    def _split_negation(self, term: Term) -> tuple[Term | None, Term | None]:
        p, x = self.split(term.args[0])
        return (None, term) if p is None else (self.negated(p), x)

    def _split_power(self, term: Term) -> tuple[Term | None, Term | None]:
        """exp(a - log b)  ->  exp(a) / b"""
        outside, kept = None, []
        for sign, part in self._without_choices(summands(term.args[0])):
            if part.op == "log" and self.fixed(part):
                b = part.args[0]
                outside = self.times(outside, b) if sign > 0 else self.over(outside, b, term)
            else:
                kept.append((sign, part))
        return (None, term) if outside is None else (outside, self.make("exp", self._summed(kept)))

    def _without_choices(self, parts: list[tuple[int, Term]]) -> list[tuple[int, Term]]:
        """where(abs(m) == inf, m, log b + m)  ->  log b + m   of logsumexp: all of the row is NaN otherwise"""
        found = []
        for sign, part in parts:
            is_choice = part.op == "where" and self.fixed(part) and _is_infinite(part.args[0], part.args[1])
            found += summands(part.args[2], sign) if is_choice else [(sign, part)]
        return found

    def _summed(self, parts: list[tuple[int, Term]]) -> Term:
        (sign, total), *others = sorted(parts, key=lambda p: -p[0])
        total = total if sign > 0 else self.make("neg", total)
        for sign, part in others:
            total = self.make("add" if sign > 0 else "sub", total, part)
        return total

    # ------------------------------------------------------------------ relative to what runs
    def shift(self, term: Term, running: frozenset[Term]) -> Shift | None:
        """G with term = G + what no running value is in; None where there is none."""
        if not depends(term, running):
            return ZERO
        if self.fixed(term):
            return Shift(term)
        rule = {"add": self._shift_sum, "sub": self._shift_sum, "mul": self._shift_product, "where": self._shift_choice}
        if term.op in ("neg", "cast"):
            inner = self.shift(term.args[0], running)
            return inner if inner is None or term.op == "cast" else Shift(self.negated(inner.by))
        return rule[term.op](term, running) if term.op in rule else None

    def _shift_sum(self, term: Term, running: frozenset[Term]) -> Shift | None:
        x, y = (self.shift(a, running) for a in term.args)
        if x is None or y is None:
            return None
        return Shift(self.plus(x.by, y.by if term.op == "add" else self.negated(y.by)))

    def _shift_product(self, term: Term, running: frozenset[Term]) -> Shift | None:
        for value, factor in (term.args, term.args[::-1]):
            if self.fixed(factor) and not depends(factor, running):
                inner = self.shift(value, running)
                return inner if inner is None else Shift(self.times(inner.by, factor) if inner.by else None)
        return None

    def _shift_choice(self, term: Term, running: frozenset[Term]) -> Shift | None:
        """An infinity moves by anything."""
        if depends(term.args[0], running):
            return None
        sides = {self.shift(a, running) for a in term.args[1:] if not is_infinite(a)}
        return sides.pop() if len(sides) == 1 else None

    def factor(self, term: Term, running: frozenset[Term]) -> Factor | None:
        """P * exp(G) with term = P * exp(G) * what no running value is in; None where there is none."""
        if not depends(term, running):
            return ONE
        if term.op in POWERS:
            inner = self.shift(term.args[0], running)
            return inner if inner is None else Factor(None, inner.by, term.op)
        if self.fixed(term):
            return Factor(term)
        return self._factor_of(term, running)

    def _factor_of(self, term: Term, running: frozenset[Term]) -> Factor | None:
        if term.op in ("neg", "cast"):
            return self.factor(term.args[0], running)
        if term.op in ("mul", "div", "add", "sub"):
            x, y = (self.factor(a, running) for a in term.args)
            if x is None or y is None:
                return None
            return self._product(term, x, y) if term.op in ("mul", "div") else x if x == y else None
        if term.op == "where" and not depends(term.args[0], running):
            sides = {self.factor(a, running) for a in term.args[1:] if not (is_number(a) and a.param == 0)}
            return sides.pop() if len(sides) == 1 else None
        if term.op == "sum":
            inner = self.factor(term.args[0], running)
            return inner if inner is None or not any(f.axes & set(term.param) for f in inner[:2] if f) else None
        return None

    def _product(self, term: Term, x: Factor, y: Factor) -> Factor | None:
        bases = {f.base for f in (x, y) if f.shift is not None}
        if len(bases) > 1:
            return None
        base = bases.pop() if bases else "exp"
        if term.op == "mul":
            return Factor(self.times(x.by, y.by), self.plus(x.shift, y.shift), base)
        return Factor(self.over(x.by, y.by, term), self.plus(x.shift, self.negated(y.shift)), base)


def _is_infinite(condition: Term, extreme: Term) -> bool:
    """abs(m) == inf, of a maximum."""
    if condition.op != "eq" or extreme.op != "amax":
        return False
    x, number = condition.args
    return x.op == "abs" and x.args[0] is extreme and is_infinite(number)


def depends(term: Term, running: Iterable[Term]) -> bool:
    """Some running value is below the term."""
    wanted = frozenset(running)
    return any(t in wanted for t in terms_below([term]))


def moving(root: Term, running: Iterable[Term]) -> frozenset[Term]:
    """Running values, and what below the root reads them."""
    found = set(running)
    for term in terms_below([root]):
        if not found.isdisjoint(term.args):
            found.add(term)
    return frozenset(found)


def summands(term: Term, sign: int = 1) -> list[tuple[int, Term]]:
    """[(sign, part)] of a sum of differences. One in a low float is a part: put together again it would be another."""
    if term.op in ("add", "sub") and term.dtype not in LOW_FLOATS:
        first, second = term.args
        return summands(first, sign) + summands(second, sign if term.op == "add" else -sign)
    return summands(term.args[0], -sign) if term.op == "neg" else [(sign, term)]
