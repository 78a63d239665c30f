"""Rows of which nothing is left: a sum relative to a maximum of -inf is NaN, and the walk's own is zero.

    p = exp(s - s.amax(-1));  p @ v  ->  exp(-inf - -inf) is NaN in all of a row that is masked out

A walk's sums are relative to 0 where there is no maximum yet, so that such a row sums to zero. Mostly that is NaN, too,
by what it is divided by: 0 / 0. Where what is made of the sum would tell zero from NaN, the sum becomes NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ....ir.passes.identities.constants import ARITHMETIC
from ....ir.types import FLOATS
from ...program.axes import Term, terms_below
from ...program.terms import TermTable
from ..separation.algebra import Algebra, is_infinite, is_number, is_tile_product
from .accumulators import Accumulation, Accumulator
from .roles import Roles

NAN, INFINITY = math.nan, math.inf


def with_rows_of_nothing(table: TermTable, plan: Accumulation, roles: Roles) -> Accumulation:
    """The same plan, its sums NaN in rows of nothing where a sink, or a later walk, reads the difference."""
    algebra = Algebra(table, roles.is_fixed)
    groups: dict[tuple[frozenset[Term], Term], list[Accumulator]] = {}
    for a in plan.accumulators:
        if a.scale is not None and any(map(_may_be_nothing, a.running)):
            groups.setdefault((a.running, a.scale), []).append(a)
    for (extremes, scale), members in groups.items():
        sums = frozenset(a.term for a in plan.accumulators)
        plan = _Group(algebra, extremes, scale, tuple(members), sums).told_apart(plan)
    return plan


def _may_be_nothing(extreme: Term) -> bool:
    """It is of what may be infinite everywhere: behind a mask, or with something added that is loaded."""
    made = terms_below(extreme.args)
    below = terms_below(extreme.args, {t for t in made if is_tile_product(t)})
    return any(is_infinite(t) or (t.op == "load" and t.dtype in FLOATS) for t in below)


@dataclass(frozen=True)
class _Group:
    """Sums of one walk that are relative to the same. sums: those of all walks, whose bodies are looked at apart."""

    algebra: Algebra
    extremes: frozenset[Term]
    scale: Term
    members: tuple[Accumulator, ...]
    sums: frozenset[Term]

    def told_apart(self, plan: Accumulation) -> Accumulation:
        turn = self.members[0].turn
        sinks = tuple(s.of_terms({t: self._of(t) for t in s.terms}) for s in plan.sinks)
        bodies = {a.term: self._of(a.body) if a.turn > turn else a.body for a in plan.accumulators}
        return Accumulation(sinks, tuple(replace(a, body=bodies[a.term]) for a in plan.accumulators))

    def _of(self, root: Term) -> Term:
        """A term of sums that are NaN where there is nothing: as few of them as make all of it so."""
        sums = [a.term for a in self.members if a.kind == "sum"]
        every = [a.term for a in self.members]
        if not self._is_read(root, every, []):
            return root
        chosen = every if self._is_read(root, every, sums) else sums
        return self.algebra.replaced(root, {t: self._told(t) if t in chosen else t for t in self.sums})

    def _is_read(self, root: Term, every: Sequence[Term], nan: Sequence[Term]) -> bool:
        """Whether a row of nothing has something else where these are NaN than where all of them are."""
        least = {e: -INFINITY if e.op == "amax" else INFINITY for e in self.extremes}
        some = _Known({**least, **{t: NAN if t in nan else 0.0 for t in every}})
        all_of_them = _Known({**least, **dict.fromkeys(every, NAN)})
        todo, seen = [root], set[Term]()
        while todo:
            term = todo.pop()
            if term in seen or term in self.sums - {*every}:
                continue
            seen.add(term)
            x, y = some.value(term), all_of_them.value(term)
            if y is None or (x is None and not math.isnan(y)):
                todo += term.args
            elif x is None or not (x == y or (math.isnan(x) and math.isnan(y))):
                return True
        return False

    def _told(self, total: Term) -> Term:
        """where(abs(scale) == inf, NaN, total)"""
        scale = self.scale
        while scale.op == "neg" or (scale.op == "mul" and is_number(scale.args[1]) and scale.args[1].param):
            scale = scale.args[0]
        size = self.algebra.make("abs", scale)
        is_nothing = self.algebra.table.test("eq", size, self.algebra.number(INFINITY, size))
        nan = self.algebra.number(NAN, total)
        return self.algebra.table.make("where", is_nothing, nan, total, dtype=total.dtype, node=total.node)


@dataclass
class _Known:
    """What terms are, of those of which it is known. None: it depends on something else."""

    values: dict[Term, float]
    made: dict[Term, float | None] = field(default_factory=dict)

    def value(self, root: Term) -> float | None:
        for term in terms_below([root], self.values):
            if term not in self.made:
                self.made[term] = self._made(term)
        return self.made[root]

    def _made(self, term: Term) -> float | None:
        if term in self.values:
            return self.values[term]
        if is_number(term):
            return float(term.param)
        args = [self.made[a] for a in term.args]
        if term.op == "where":
            return None if args[0] is None else args[1] if args[0] else args[2]
        if term.op in KEEPS_NAN and any(a is not None and math.isnan(a) for a in args):
            return NAN
        if term.op in ("mul", "div") and (args[0] == 0.0 or (term.op == "mul" and args[1] == 0.0)):
            args = [1.0 if a is None else a for a in args]  # zero, if it is not NaN
        if None in args or term.op not in RULES:
            return None
        kind = np.bool_ if term.op in ("and", "or", "not") else np.float64
        with np.errstate(all="ignore"):
            return RULES[term.op](*map(kind, args)).item()  # type: ignore[no-any-return]


RULES: dict[str, Callable[..., Any]] = {
    **ARITHMETIC, "fma": lambda x, y, z: x * y + z, "cast": lambda x: x, "log": np.log, "exp": np.exp,
}  # fmt: skip
KEEPS_NAN = frozenset("add sub mul div neg fma abs cast log exp exp2 log2 sqrt rsqrt max min tanh sigmoid".split())
"""NaN where an argument is; a maximum as torch takes it."""
