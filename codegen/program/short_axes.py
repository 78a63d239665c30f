"""Short axes of products, of what is summed and of columns, place by place: what the place decides, is decided.

    sum over k, j of x[k, j] * where(j < 1, w[k] & 15, w[k] >> 4)
        ->  sum over k of x[k, 0] * (w[k] & 15)  +  sum over k of x[k, 1] * (w[k] >> 4)

    y[2 * n + j] = sum over k of x[k] * where(j < 1, w[k, n] & 15, w[k, n] >> 4)
        ->  y[2 * n] = sum over k of x[k] * (w[k, n] & 15);  y[2 * n + 1] = sum over k of x[k] * (w[k, n] >> 4)
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...ir.types import INTEGERS, LOW_FLOATS
from .axes import Axis, Index, Sink, Term, terms_below
from .terms import TermTable

PLACES = 8
"""Axes are written out for at most so many places: the nibbles of an int32."""
Places = Mapping[Axis, int]

NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv,
    "rem": operator.mod, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "eq": operator.eq, "ne": operator.ne, "and": operator.and_, "or": operator.or_,
}  # fmt: skip
"""Operations on integers that are known, or on truths."""


def written_out(terms: TermTable, sinks: Sequence[Sink], is_product: Callable[[Term], bool]) -> list[Sink]:
    """The sinks without short columns, and with short axes of sums gone: their parts are rounded once, added."""
    while (column := _short_column(sinks, is_product)) is not None:
        sinks = [_at_column(terms, s, column, place) for s in sinks for place in range(int(column.size))]
    return _sums_written_out(terms, sinks, is_product)


def _short_column(sinks: Sequence[Sink], is_product: Callable[[Term], bool]) -> Axis | None:
    """The axis of neighbours in memory, where it is short, and the columns of a product have another beside it."""
    close = {a for s in sinks for a, step in s.place.terms if step == 1}
    shared = {a for a in close.intersection(*(s.axes for s in sinks)) if _is_short(a)}
    factors = [t.args[0].args for t in terms_below(t for s in sinks for t in s.terms) if is_product(t)]
    sides = [one.axes - other.axes for pair in factors for one, other in itertools.permutations(pair, 2)]
    return next((a for side in sides for a in sorted(side & shared, key=lambda a: a.order) if len(side) > 1), None)


def _is_short(axis: Axis) -> bool:
    return isinstance(axis.size, int) and 1 < axis.size <= PLACES


def _at_column(terms: TermTable, sink: Sink, column: Axis, place: int) -> Sink:
    at = _At(terms, {column: place})
    axes = tuple(a for a in sink.axes if a is not column)
    return replace(sink, value=at.of(sink.value), place=sink.place.renamed(at.to), axes=axes)


def _sums_written_out(terms: TermTable, sinks: Sequence[Sink], is_product: Callable[[Term], bool]) -> list[Sink]:
    new: dict[Term, Term] = {}
    for term in terms_below(t for s in sinks for t in s.terms):
        args = tuple(new[a] for a in term.args)
        short = _short_axes(term) if is_product(term) else ()
        made = terms.make(term.op, *args, dtype=term.dtype, param=term.param, node=term.node)
        new[term] = _sum_of_places(terms, made, short) if short else made
    return [s.of_terms(new) for s in sinks]


def _short_axes(total: Term) -> tuple[Axis, ...]:
    """Axes of so few places that their sums are written out, parts of others first; one stays that is longer."""
    sizes = [(a, a.size) for a in sorted(total.param, key=lambda a: -a.order)]
    short: list[Axis] = []
    places = 1
    for axis, size in sizes:
        if _is_short(axis) and places * size <= PLACES and len(short) + 1 < len(sizes):
            short.append(axis)
            places *= size
    return tuple(short)


def _sum_of_places(terms: TermTable, total: Term, short: tuple[Axis, ...]) -> Term:
    rest = tuple(a for a in total.param if a not in short)
    dtype = "f32" if total.dtype in LOW_FLOATS else total.dtype
    parts = []
    for places in itertools.product(*(range(int(a.size)) for a in short)):
        factors = _At(terms, dict(zip(short, places, strict=True))).of(total.args[0])
        parts.append(terms.make("sum", factors, dtype=dtype, param=rest, node=total.node))
    added = functools.reduce(lambda a, b: terms.make("add", a, b, dtype=dtype), parts)
    return terms.cast(added, total.dtype, total.node)


class _At:
    """Terms at one place of some axes."""

    def __init__(self, terms: TermTable, places: Places) -> None:
        self.terms, self.places = terms, places
        self.to = {axis: Index(offset=place) for axis, place in places.items()}

    def of(self, root: Term) -> Term:
        """The term there."""
        moved: dict[Term, Term] = {}
        for term in terms_below([root]):
            args = tuple(moved[a] for a in term.args)
            moved[term] = self._moved(term, args) if self.to.keys() & term.axes else term
        return moved[root]

    def _moved(self, term: Term, args: tuple[Term, ...]) -> Term:
        if term.op == "load":
            return self._load(term, args)
        if term.op == "index":
            return self.terms.index(term.param.renamed(self.to), term.dtype)
        if term.op == "spread":
            axes = tuple(a for a in term.param if a not in self.to)
            return self.terms.make("spread", *args, dtype=term.dtype, param=axes, node=term.node) if axes else args[0]
        return self._known(term, args) or self._simplified(term, args)

    def _load(self, term: Term, args: tuple[Term, ...]) -> Term:
        """The load without guards that hold there; under one that does not, nothing is read."""
        count = len(term.param.indirect)
        guards = [g for g in args[count:] if not (g.op == "const" and g.param)]
        if any(g.op == "const" for g in guards):
            return self.terms.const(0, term.dtype)
        param = replace(term.param, place=term.param.place.renamed(self.to))
        return self.terms.make("load", *args[:count], *guards, dtype=term.dtype, param=param, node=term.node)

    def _known(self, term: Term, args: tuple[Term, ...]) -> Term | None:
        """An operation on numbers, carried out."""
        if not all(a.op == "const" and isinstance(a.param, int) for a in args):
            return None
        if term.op == "cast" and term.dtype in INTEGERS:
            return self.terms.const(int(args[0].param), term.dtype)
        if term.op in NUMBERS and term.dtype in (*INTEGERS, "b1"):
            return self.terms.const(NUMBERS[term.op](args[0].param, args[1].param), term.dtype)
        return None

    def _simplified(self, term: Term, args: tuple[Term, ...]) -> Term:
        """A choice that is known is what it chooses, and a shift by nothing what is shifted."""
        if term.op in ("shl", "shr") and args[1].op == "const" and args[1].param == 0:
            return args[0]
        if term.op == "where" and args[0].op == "const":
            return args[1] if args[0].param else args[2]
        return self.terms.make(term.op, *args, dtype=term.dtype, param=term.param, node=term.node)
