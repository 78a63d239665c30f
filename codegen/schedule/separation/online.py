"""Sums along a row in chunks that ride along in the pass of the extreme that they are relative to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...program.axes import Axis, Term, terms_below
from ...program.terms import TermTable
from .algebra import POWERS, Algebra, summands
from .exponents import Exponents, bare

EXTREMES = ("amax", "amin")
WIDE = ("f32", "f64")
"""The dtypes of what is not rounded on the way."""


@dataclass(frozen=True)
class OnlineSum:
    """A sum of base(scale(top)) * rest.

    is_plain: a sum of powers one of which is 1, the one of the extreme itself, and none of which is more.
    """

    top: Term
    scale: Term
    base: str
    is_plain: bool

    @property
    def is_bare(self) -> bool:
        """Infinite where the extreme is: nothing stands for it then."""
        return self.is_plain and self.top in (self.scale, *self.scale.args)


def online_sums(reductions: Iterable[Term], row: Iterable[Axis]) -> dict[Term, OnlineSum]:
    """The sums along the row that do without a pass of their own.

    Beside each extreme one is plain: where that is zero, nothing but infinities went into the extreme.
    """
    reduced, along = frozenset(reductions), frozenset(row)
    found = {total: _online(total, reduced, along) for total in reduced if total.op == "sum"}
    known = {total: online for total, online in found.items() if online is not None}
    witnessed = {online.top for online in known.values() if online.is_plain}
    return {t: o for t, o in sorted(known.items(), key=lambda item: item[0].order) if o.top in witnessed}


def _online(total: Term, reduced: frozenset[Term], row: frozenset[Axis]) -> OnlineSum | None:
    (body,) = total.args
    top = _lone_extreme(body, reduced)
    if top is None or top.param != total.param:
        return None
    algebra = Algebra(TermTable(), lambda term: not term.axes & row)
    exponents = Exponents.of(body, frozenset((top,)), algebra.fixed)
    if any(t.dtype not in WIDE and t.dtype != "b1" for t in exponents.moved):
        return None
    factor = algebra.factor(body, exponents.running)
    if factor is None or factor.by is not None or factor.shift is None or not exponents.are_bounded(body):
        return None
    return OnlineSum(top, factor.shift, factor.base, _is_plain(body, top, exponents))


def _lone_extreme(body: Term, reduced: frozenset[Term]) -> Term | None:
    """The only reduction that the body reads, if it is an extreme."""
    read = reduced.intersection(terms_below([body]))
    last = max(read, key=lambda t: t.order, default=None)
    if last is None or last.op not in EXTREMES:
        return None
    return last if not read - {last} - set(terms_below(last.args)) else None


def _is_plain(body: Term, top: Term, exponents: Exponents) -> bool:
    """exp(x - m) or exp(m - x), where m is the extreme of x, or what stands for it where it is infinite."""
    if body.op not in POWERS or not exponents.is_bounded(body.args[0]):
        return False
    parts = summands(body.args[0])
    sign = 1 if top.op == "amin" else -1
    own = [(-sign * s, bare(part)) for s, part in summands(top.args[0])]
    rest = [(s, bare(part)) for s, part in parts if not exponents.moves(part)]
    moving = [part for _, part in parts if exponents.moves(part)]
    is_own = len(moving) == 1 and exponents.is_extreme(moving[0])
    return is_own and sorted(own, key=_order) == sorted(rest, key=_order)


def _order(part: tuple[int, Term]) -> tuple[int, int]:
    return part[0], part[1].order
