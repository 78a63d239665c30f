"""What a streamed kernel accumulates: reductions along the stream in float32, in as few passes as separation allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ....ir import Value
from ....ir.errors import Unfusible
from ....ir.types import FLOATS
from ...program.axes import REDUCTIONS, Axis, Index, Materialize, Sink, Term, terms_below
from ...program.sizes import same
from ...program.terms import TermTable
from ..separation.algebra import Algebra, Factor, Shift, depends, is_number, is_tile_product, source_of_rounded
from ..separation.exponents import Exponents
from .roles import Roles, extreme_in_memory

Kind = Literal["product", "sum", "amax", "amin"]
LARGE = 1e30
"""Finite numbers beyond it are masks."""


@dataclass(frozen=True)
class Accumulator:
    """term: a reduction along the stream of `body`, found in pass `turn`.

    scale: exp(G) that it is relative to, of the `running` values of its own pass. beside: the extreme of which it is
    the first place, or the number of elements that are it; its body reads that as `now`, as far as it is known, and it
    begins again where that moves.
    """

    term: Term
    body: Term
    kind: Kind
    turn: int
    running: frozenset[Term] = frozenset()
    scale: Term | None = None
    base: str = "exp"
    beside: Term | None = None
    now: Term | None = None


@dataclass(frozen=True)
class Accumulation:
    """The sinks of a kernel in terms of accumulators, in an order that runs; `passes` over the stream."""

    sinks: tuple[Sink, ...]
    accumulators: tuple[Accumulator, ...]

    @property
    def passes(self) -> int:
        return 1 + max(a.turn for a in self.accumulators)

    def of_pass(self, turn: int) -> tuple[Accumulator, ...]:
        return tuple(a for a in self.accumulators if a.turn == turn)


def accumulation_of(table: TermTable, sinks: Sequence[Sink], roles: Roles, fast: bool) -> Accumulation:
    """The plan of one kernel's sums. Raises Materialize and Unfusible."""
    plain = _Plain(table, roles, fast).sinks(sinks)
    return _Accumulators(table, roles).of(plain)


class _Plain:
    """Terms as separation reads them: float32 between running sums, quotients by rows as products."""

    def __init__(self, table: TermTable, roles: Roles, fast: bool) -> None:
        self.algebra, self.roles, self.fast = Algebra(table, roles.is_fixed), roles, fast
        self.between: set[Term] = set()
        self.compared: set[Term] = set()

    def sinks(self, sinks: Sequence[Sink]) -> list[Sink]:
        roots = [t for s in sinks for t in s.terms]
        self.between, self.compared = self._between(roots), _compared(roots)
        new = self.algebra.rewritten(roots, self._rule)
        return [s.of_terms(new) for s in sinks]

    def _between(self, roots: Sequence[Term]) -> set[Term]:
        """What is made of one running sum, and goes into another."""
        sums = [t for t in terms_below(roots) if _reduces(t, self.roles)]
        return {t for s in sums for t in terms_below(s.args) if depends(t, sums)}

    def _rule(self, term: Term, args: tuple[Term, ...]) -> Term:
        if term in self.compared:
            return self.algebra.again(term, args)
        is_wide = self.fast or term in self.between
        new = self.algebra.widened(term, args) if is_wide else self.algebra.again(term, args)
        return self._in_order(self._without_quotient(new))

    def _without_quotient(self, term: Term) -> Term:
        """A quotient of a tile by a row: the row is inverted once."""
        if term.op != "div" or term.dtype not in FLOATS or is_number(term.args[1]):
            return term
        x, y = term.args
        tile = frozenset((self.roles.row, self.roles.stream))
        if not (tile & x.axes > tile & y.axes):
            return term
        return self.algebra.make("mul", x, _inverse_in_memory(y) or self._inverse(y))

    def _inverse(self, row: Term) -> Term:
        return self.algebra.make("div", self.algebra.number(1.0, row), row)

    def _in_order(self, term: Term) -> Term:
        """where(c, number, x)  ->  where(not c, x, number);  not (i > j)  ->  i <= j"""
        table = self.algebra.table
        if term.op == "where" and term.args[1].op == "const" and _is_before(*term.args[1:]):
            c, number, x = term.args
            opposite = self._in_order(table.make("not", c, dtype="b1"))
            return table.make("where", opposite, x, number, dtype=term.dtype, node=term.node)
        if term.op == "not" and term.args[0].op in OPPOSITE and term.args[0].args[0].dtype not in FLOATS:
            inner = term.args[0]
            return table.make(OPPOSITE[inner.op], *inner.args, dtype="b1", node=inner.node)
        if term.op == "not" and term.args[0].op in ("or", "not"):
            inner = term.args[0]
            parts = [self._in_order(table.make("not", a, dtype="b1")) for a in inner.args]
            return table.make("and", *parts, dtype="b1") if inner.op == "or" else inner.args[0]
        return term


def _inverse_in_memory(row: Term) -> Term | None:
    """What a row is the reciprocal of, where that is read as float32: forward hands over sums inverted."""
    row = source_of_rounded(row)
    is_one = row.op == "reciprocal" and row.args[0].op == "load" and row.args[0].dtype == "f32"
    return row.args[0] if is_one else None


def _compared(roots: Sequence[Term]) -> set[Term]:
    """What is compared with an extreme in memory: to the last digit what it was where the extreme was found."""
    found = [t.args for t in terms_below(roots) if t.op == "eq" and any(map(extreme_in_memory, t.args))]
    return {t for args in found for t in terms_below(args)}


def _is_before(first: Term, second: Term) -> bool:
    """A number that stands before what it masks: any, beside what is none; -inf beside another."""
    return second.op != "const" or (first.param == -math.inf and second.param != -math.inf)


OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}


def _reduces(term: Term, roles: Roles) -> bool:
    return term.op in REDUCTIONS and bool(set(term.param) & roles.over)


class _Accumulators:
    """Reductions along the stream, arguments first."""

    def __init__(self, table: TermTable, roles: Roles) -> None:
        self.table, self.roles, self.algebra = table, roles, Algebra(table, roles.is_fixed)
        self.found: dict[Term, Accumulator] = {}

    def of(self, sinks: Sequence[Sink]) -> Accumulation:
        new = self.algebra.rewritten([t for s in sinks for t in s.terms], self._rule)
        done = tuple(s.of_terms(new) for s in sinks)
        live = set(terms_below(t for s in done for t in s.terms))
        if not live & self.found.keys():
            raise Unfusible(done[0].node, "products are left to the library: nothing sums them")
        live |= {t for a in self.found.values() if a.term in live for t in terms_below([a.body])}
        accumulators = tuple(a for a in self.found.values() if a.term in live)
        self._require_one_walk(accumulators)
        return Accumulation(done, accumulators)

    def _require_one_walk(self, accumulators: Sequence[Accumulator]) -> None:
        """What is reduced over some of the axes that are walked is complete before those over all of them."""
        apart = [a.term for a in accumulators if set(a.term.param) != self.roles.over]
        if apart:
            raise Materialize([_node(t) for t in apart])

    def _rule(self, term: Term, args: tuple[Term, ...]) -> Term:
        again = self.algebra.again(term, args)
        return self._accumulated(term, again) if _reduces(term, self.roles) else again

    def _accumulated(self, term: Term, again: Term) -> Term:
        """outside * accumulator"""
        (argument,) = again.args
        if term.op in ("amax", "amin"):
            extreme = self._accumulator(term, argument, term.param)
            return self.algebra.table.cast(extreme, term.dtype, term.node)
        if term.op != "sum":
            raise Unfusible(_node(term), f"{term.op} along what is streamed")
        outside, inside = self.algebra.split(argument)
        if inside is None:  # a sum of what does not vary
            raise Materialize([_node(term)])
        total = self._sum(term, inside)
        total = total if outside is None else self.algebra.make("mul", total, outside)
        return self.algebra.table.cast(total, term.dtype, term.node)

    def _sum(self, term: Term, inside: Term) -> Term:
        """The sum of sums is one sum over all their axes."""
        inner = self.found.get(inside)
        if inner is None or inner.kind not in ("sum", "product"):
            return self._accumulator(term, inside, term.param)
        if inner.running:
            raise Materialize([_node(inner.term)])
        over = {*term.param, *inner.term.param}
        return self._accumulator(inner.term, inner.body, tuple(sorted(over, key=lambda a: a.order)))

    def _accumulator(self, term: Term, body: Term, over: tuple[Axis, ...]) -> Term:
        dtype = "f32" if term.dtype in ("f16", "bf16") else term.dtype
        new = self.table.make(term.op, body, dtype=dtype, param=tuple(over), node=term.node)
        if new not in self.found:
            self.found[new] = self._placed(new, body)
        return new

    def _placed(self, term: Term, body: Term) -> Accumulator:
        """In the pass of the last reduction that it reads, if it separates from those; else in the next."""
        kind = self._kind(term, body)
        below = set(terms_below([body]))
        read = [a for a in self.found.values() if a.term in below]
        turn = max((a.turn for a in read), default=0)
        running = frozenset(a.term for a in read if a.turn == turn)
        if not running:
            return Accumulator(term, body, kind, turn)
        if (extreme := self._extreme_beside(term, body, running)) is not None:
            now = self.table.make("carried", dtype=extreme.dtype, param=extreme)
            body = self.algebra.replaced(body, {extreme: now})
            return Accumulator(term, body, kind, turn, beside=extreme, now=now)
        found = self.algebra.factor(body, running) if term.op == "sum" else self.algebra.shift(body, running)
        if not _is_online(found):
            return Accumulator(term, body, kind, turn + 1)
        assert isinstance(found, Factor)
        if any(self.found[r].kind not in ("amax", "amin") for r in running if depends(found.shift or body, (r,))):
            return Accumulator(term, body, kind, turn + 1)
        if not Exponents.of(body, running, self.roles.is_fixed).are_bounded(body) or _overflows(found, body, running):
            return Accumulator(term, body, kind, turn + 1)
        return Accumulator(term, body, kind, turn, running, found.shift, found.base)

    def _extreme_beside(self, term: Term, body: Term, running: frozenset[Term]) -> Term | None:
        """The extreme r, if the term is its first place, or the number of its places; None where it is neither."""
        if body.dtype in FLOATS or len(running) != 1:
            return None
        (extreme,) = running
        if self.found[extreme].kind not in ("amax", "amin"):
            return None
        return self._counted(term, body, extreme) if term.op == "sum" else self._place_of(term, body, extreme)

    def _counted(self, term: Term, body: Term, extreme: Term) -> Term | None:
        """The extreme r of a sum over x == r."""
        counts = body.op == "cast" and _meets(body.args[0], self.found[extreme].body, extreme)
        return extreme if counts and not self.roles.keeps_stream else None

    def _place_of(self, term: Term, body: Term, extreme: Term) -> Term | None:
        """The extreme r, if the term is the least j with x == r, or where x is NaN, and their number elsewhere."""
        if term.op != "amin" or body.op != "where":
            return None
        (condition, place, nothing), hits = body.args, body.args[0].args
        hits = hits if condition.op == "or" else (condition,)
        stream = self.roles.stream
        is_place = place.op == "index" and place.param == Index.over(stream) and not self.roles.keeps_stream
        if not is_place or nothing.op != "const" or not same(nothing.param, stream.size):
            return None
        x = self.found[extreme].body
        is_found = any(_meets(h, x, extreme) for h in hits)
        others = all(_meets(h, x, extreme) or (h.op == "isnan" and h.args[0] == x) for h in hits)
        return extreme if is_found and others else None

    def _kind(self, term: Term, body: Term) -> Kind:
        if term.op == "sum" and operands_of(body, self.roles) is not None:
            return "product"
        if self.roles.row not in body.axes:  # it is the same for all rows, as that of a column of keys
            raise Materialize([_node(term)])
        if term.op != "sum":
            return "amax" if term.op == "amax" else "amin"
        if body.axes & set(self.roles.depth):
            raise Unfusible(_node(term), "a tile of three axes")
        return "sum"


def _meets(hit: Term, x: Term, extreme: Term) -> bool:
    """x == r; the extreme of low floats is one of them, in float32."""
    if hit.op != "eq":
        return False
    sides = [a.args[0] if a.op == "cast" and a.args[0] == extreme else a for a in hit.args]
    return sides in ([x, extreme], [extreme, x])


def operands_of(body: Term, roles: Roles) -> tuple[Term, Term] | None:
    """(x[row, stream], y[stream, depth]) of a product that is summed along the stream; None where it is none."""
    if body.op != "mul" or roles.keeps_stream:
        return None
    for x, y in (body.args, body.args[::-1]):
        is_tile = {roles.row, roles.stream} <= x.axes and not x.axes & set(roles.depth)
        if is_tile and roles.stream in y.axes and roles.row not in y.axes and y.axes & set(roles.depth):
            return x, y
    return None


def _is_online(found: Factor | Shift | None) -> bool:
    """A sum that is relative by a power alone; extremes that move have a pass of their own."""
    return isinstance(found, Factor) and found.by is None


def _overflows(found: Factor, body: Term, running: frozenset[Term]) -> bool:
    """It is relative to several times an extreme that may be the least float: a mask, of which twice is infinite."""
    return found.shift is not None and _multiple(found.shift, running) > 1 and not is_moderate(body)


def is_moderate(tile: Term) -> bool:
    """Made of products, places and numbers of moderate size: no float that was loaded for it."""
    todo, seen = [tile], set[Term]()
    while todo:
        term = todo.pop()
        if term in seen or is_tile_product(term):
            continue
        seen.add(term)
        is_wild = term.op == "const" and is_number(term) and LARGE < abs(term.param) < math.inf
        if is_wild or (term.op == "load" and term.dtype in FLOATS):
            return False
        todo += term.args
    return True


def _multiple(term: Term, running: frozenset[Term]) -> float:
    """How many times a running value is in a sum of such values."""
    if term in running:
        return 1
    parts = [_multiple(a, running) for a in term.args]
    if term.op in ("add", "sub"):
        return sum(parts)
    if term.op == "mul" and is_number(term.args[1]):
        return parts[0] * abs(float(term.args[1].param))
    return max(parts, default=0)


def _node(term: Term) -> Value:
    assert term.node is not None
    return term.node
