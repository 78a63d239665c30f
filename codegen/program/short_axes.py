"""Short axes of products, of what is summed and of columns, place by place: what the place decides, is decided.

    sum over k, j of x[k, j] * where(j < 1, w[k] & 15, w[k] >> 4)
        ->  sum over k of x[k, 0] * (w[k] & 15)  +  sum over k of x[k, 1] * (w[k] >> 4)

    y[2 * n + j] = sum over k of x[k] * where(j < 1, w[k, n] & 15, w[k, n] >> 4)
        ->  y[2 * n] = sum over k of x[k] * (w[k, n] & 15);  y[2 * n + 1] = sum over k of x[k] * (w[k, n] >> 4)

Where halves of a row are read anyway, a reduction of the row is one of its halves: each is read once.

    sum over j, k of x[j, k];  x[0, k];  x[1, k]   ->   sum over k of x[0, k] + x[1, k]
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...ir.types import INTEGERS, LOW_FLOATS
from .axes import SCANS, Axis, Index, Sink, Term, terms_below
from .joining import joined
from .sizes import divide, nonnegative, same, tidy
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


# ------------------------------------------------------------------ rows whose pieces are read
MOST_PIECES = 4
"""A row in more pieces stays one: each is a tile of its own in registers."""
TOGETHER = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}
"""What makes one of two parts of a reduction."""


def in_pieces(terms: TermTable, sinks: Sequence[Sink]) -> list[Sink]:
    """The sinks, where what is stored and reduced of rows is so piece by piece, if all that takes is read anyway."""
    made = _in_pieces(terms, sinks)
    for axis, count in _every_other(made):
        outer = divide(axis.size, count)
        assert outer is not None
        divided = terms.renamed(made, {axis: terms.axes.halves(axis, count, outer)})
        divided = terms.renamed(divided, joined(divided).mapping())
        pieces = _in_pieces(terms, divided)
        is_fewer = len(_loads(pieces)) < len(_loads(made))
        made = pieces if is_fewer else terms.renamed(made, {})  # the same terms, in the table again
    return made


def _in_pieces(terms: TermTable, sinks: Sequence[Sink]) -> list[Sink]:
    read = _loads(sinks)
    for axis in sorted({a for t in read for a in t.axes if _may_be_pieces(a)}, key=lambda a: a.order):
        if _is_plain(sinks, axis):
            pieces = _stored_by_pieces(terms, _reduced_by_pieces(terms, sinks, axis), axis)
            if _loads(pieces) <= read:
                return _in_pieces(terms, pieces)
    return list(sinks)


def _every_other(sinks: Sequence[Sink]) -> list[tuple[Axis, int]]:
    """Axes along which a buffer is read whole, and every other element of it, or every third, by other loads."""
    read = [t.param for t in _loads(sinks)]
    found = {}
    for long, short in itertools.permutations(read, 2):
        pairs = itertools.product(long.place.terms, short.place.terms) if long.ref == short.ref else ()
        for (axis, stride), (other, step) in pairs:
            count = divide(step, stride)
            if not isinstance(count, int) or not 1 < count <= MOST_PIECES or axis.turn:
                continue
            if same(tidy(other.size * count), axis.size):
                found[axis] = count
    return sorted(found.items(), key=lambda pair: pair[0].order)


def _loads(sinks: Sequence[Sink]) -> set[Term]:
    return {t for t in terms_below(t for s in sinks for t in s.terms) if t.op == "load"}


def _may_be_pieces(axis: Axis) -> bool:
    return isinstance(axis.size, int) and 1 < axis.size <= MOST_PIECES and not axis.turn


def _is_plain(sinks: Sequence[Sink], axis: Axis) -> bool:
    """True if what is made along an axis knows no other place of it than its own."""
    along = (t for t in terms_below(t for s in sinks for t in s.terms) if axis in t.axes)
    return all(s.mode == "store" and s.by is None for s in sinks) and not any(t.op in APART for t in along)


APART = (*SCANS, "matmul", "moved", "crossed", "carried", "last", "random", "check_index")
"""Operations along an axis whose lanes are not each for itself, or whose place is said in other ways."""


def _stored_by_pieces(terms: TermTable, sinks: Sequence[Sink], axis: Axis) -> list[Sink]:
    return [p for s in sinks for p in (_pieces_of(terms, s, axis) if axis in s.axes else [s])]


def _pieces_of(terms: TermTable, sink: Sink, axis: Axis) -> list[Sink]:
    return [_at_column(terms, sink, axis, n) for n in range(int(axis.size))]


def _reduced_by_pieces(terms: TermTable, sinks: Sequence[Sink], axis: Axis) -> list[Sink]:
    new: dict[Term, Term] = {}
    for term in terms_below(t for s in sinks for t in s.terms):
        made = terms.again(term, tuple(new[a] for a in term.args))
        new[term] = _of_pieces(terms, made, axis) if term.op in TOGETHER and axis in term.param else made
    return [s.of_terms(new) for s in sinks]


def _of_pieces(terms: TermTable, total: Term, axis: Axis) -> Term:
    """The reduction of what is made of the pieces element by element; sums of low floats are rounded once."""
    dtype = "f32" if total.op == "sum" and total.dtype in LOW_FLOATS else total.dtype
    parts = [terms.cast(_At(terms, {axis: n}).of(total.args[0]), dtype) for n in range(int(axis.size))]
    both = functools.reduce(lambda a, b: terms.make(TOGETHER[total.op], a, b, dtype=dtype, node=total.node), parts)
    rest = tuple(a for a in total.param if a is not axis)
    reduced = terms.make(total.op, both, dtype=dtype, param=rest, node=total.node) if rest else both
    return terms.cast(reduced, total.dtype, total.node)


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
        """An operation on numbers, carried out; a comparison of a place with what it is always below, or never."""
        if term.op in ("lt", "ge") and args[0].op == "index" and args[1].op == "const":
            bounds, end = args[0].param.bounds(), args[1].param
            if bounds is not None and (nonnegative(tidy(end - 1 - bounds[1])) or nonnegative(tidy(bounds[0] - end))):
                return self.terms.const(nonnegative(tidy(end - 1 - bounds[1])) is (term.op == "lt"), "b1")
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
