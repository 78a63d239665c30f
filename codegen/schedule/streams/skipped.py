"""What blocks that a mask skips would have added: nothing; or NaN, where a row or a place has nothing left.

    p[i, j] = exp(where(i >= j, s, -inf) - lse[i])      of a query i that padding leaves nothing, lse is NaN

In eager NaN reaches all keys j, those too that the mask does not let it see. A walk over the queries of some keys adds
the same to their sums: exp(-inf - lse[i]) of what it skips, 0 or NaN, which reads one number a query and no matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import sympy

from ....ir.types import FLOATS, Size
from ...program.axes import REDUCTIONS, Axis, Term, terms_below
from ...program.sizes import Hints, evaluate_size, nonnegative, tidy
from ..separation.algebra import POWERS, Algebra, is_infinite, is_number, is_tile_product
from .accumulators import Accumulator
from .masks import NOTHING, Bound, Span, conjuncts, silent_parts, span_of_masks
from .roles import Roles


def span_of(algebra: Algebra, accumulators: Sequence[Accumulator], roles: Roles, hints: Hints) -> Span:
    """The part of the stream that a pass walks: all of it, where only that tells what the rest would have added."""
    span = span_of_masks(accumulators, roles)
    if not span.is_bounded:
        return span
    nothing = _Nothing(algebra, span.implied, roles, frozenset(a.term for a in accumulators))
    added = {a.term: nothing.of(a.body, NOTHING[a.kind]) for a in accumulators}
    kept, guards = dict[Term, Term](), dict[sympy.Basic, None]()
    for along in (roles.row, roles.stream):
        reading = {t: each for t, each in added.items() if _reads_along(each, along, roles)}
        held = _held(span, along, accumulators, roles) if reading else []
        if held is not None and all(evaluate_size(slack, hints) >= 0 for slack in held):
            guards.update((sympy.Ge(slack, 0), None) for slack in held if not nonnegative(slack))
            continue
        for term, each in reading.items():
            if each is None or {roles.row, roles.stream} <= each.axes or term.op in ("amax", "amin"):
                return Span(silenced=span.silenced, apart=span.apart)
            kept[term] = each
    return replace(span, added=kept, guards=tuple(guards))


def _reads_along(added: Term | None, along: Axis, roles: Roles) -> bool:
    """It has numbers for the places of the stream; or others, of a row or of the whole program."""
    if added is None:
        return True
    return any((roles.stream in t.axes) == (along is roles.stream) for t in terms_below([added]) if _is_data(t))


def _is_data(term: Term) -> bool:
    return term.op in ("load", *REDUCTIONS) and term.dtype in FLOATS


# ------------------------------------------------------------------ in a place that is skipped
@dataclass(frozen=True)
class _Nothing:
    """Terms where not all conditions hold. sums: those of the walk itself, which are finite meanwhile."""

    algebra: Algebra
    conditions: frozenset[Term]
    roles: Roles
    sums: frozenset[Term]

    def of(self, term: Term, nothing: float) -> Term | None:
        """`nothing`, or what numbers of a row or of a place make of it; None where the term is silent for no mask."""
        if term.op == "where":
            return self._chosen(term, nothing)
        if nothing == 0.0 and term.op in ("add", "sub"):  # both have to vanish
            x, y = (self.of(a, 0.0) for a in term.args)
            return None if x is None or y is None else self._sum(x, y)
        for part, value in silent_parts(term, nothing):
            if (inside := self.of(part, value)) is not None:
                return self._around(term, part, inside, nothing)
        return None

    def _chosen(self, term: Term, nothing: float) -> Term | None:
        condition, x, other = term.args
        if not is_number(other) or other.param != nothing:
            return None
        inside = other if self.conditions <= {*conjuncts(condition)} else self.of(x, nothing)
        if inside is None or is_number(inside):
            return inside
        return self.algebra.table.make("where", condition, inside, other, dtype=term.dtype, node=term.node)

    def _sum(self, x: Term, y: Term) -> Term:
        return y if is_number(x) else x if is_number(y) or x is y else self.algebra.make("add", x, y)

    def _around(self, term: Term, part: Term, inside: Term, nothing: float) -> Term:
        """The same operation of what its part is; its other arguments count where they may be NaN or infinite."""
        if term.op == "fma" and self._is_complete(term.args[2]):
            return self.algebra.make("add", inside, term.args[2])
        if any(self._is_complete(a) for a in term.args if a is not part):
            return self.algebra.make(term.op, *(inside if a is part else a for a in term.args))
        if is_number(inside):
            return self.algebra.number(nothing, term)
        return self.algebra.make(term.op, inside) if term.op in (*POWERS, "sigmoid") else inside

    def _is_complete(self, term: Term) -> bool:
        """A number of a row, or of a place of the stream, that is made of data, and known before the walk."""
        both, inside = {self.roles.row, self.roles.stream}, {*self.roles.depth, *self.roles.places}
        if both <= term.axes or term.axes & inside:
            return False
        made = {t for t in terms_below([term]) if t.op in REDUCTIONS}
        below = terms_below([term], made)
        is_made_here = any(t in self.sums or t.axes & self.roles.over for t in below if t in made)
        return not is_made_here and any(map(_is_data, below))


# ------------------------------------------------------------------ whether a row may have nothing left
def _held(span: Span, along: Axis, accumulators: Sequence[Accumulator], roles: Roles) -> list[Size] | None:
    """Not negative where each place along an axis has one across that masks admit; None where data decides."""
    bounds = (*span.lows, *span.highs)
    if any(b.numbers for b in bounds) or (along is roles.stream and _has_more(accumulators, span.implied, roles)):
        return None
    across = roles.stream if along is roles.row else roles.row
    return list(_slacks(bounds, along is roles.row, along.size, across.size))


def _has_more(accumulators: Sequence[Accumulator], conditions: frozenset[Term], roles: Roles) -> bool:
    """Other masks than these may leave places of the stream nothing: conditions, or numbers that are added."""
    bodies = [a.body for a in accumulators]
    below = terms_below(bodies, {t for t in terms_below(bodies) if is_tile_product(t)})
    choices = (t for t in below if t.op == "where" and is_infinite(t.args[2]))
    if any(not conditions >= {*conjuncts(t.args[0])} for t in choices):
        return True
    numbers = (t for t in below if t.op == "load" and _is_data(t) and not t.axes & {*roles.depth})
    return any(roles.row in t.axes for t in numbers)


def _slacks(bounds: Sequence[Bound], is_row: bool, along: Size, across: Size) -> Iterator[Size]:
    """Not negative where each place along an axis has one across that all bounds admit: at both ends of the axis."""
    lows: list[tuple[int, Size]] = [(0, 0)]  # across >= slope * place + offset
    highs: list[tuple[int, Size]] = [(0, tidy(across - 1))]
    for b in bounds:
        mine, other = (b.row, b.by) if is_row else (b.by, b.row)
        if other == 0:
            yield from (tidy(mine * place + b.offset) for place in (0, along - 1))
        elif other > 0:
            lows.append((-mine, tidy(-b.offset)))
        else:
            highs.append((mine, b.offset))
    for low_slope, low in lows:
        for high_slope, high in highs:
            if (low_slope, low) != (0, 0) or (high_slope, high) != highs[0]:
                yield from (tidy((high_slope - low_slope) * place + high - low) for place in (0, along - 1))
