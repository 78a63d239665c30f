"""Where along the stream a block of rows has anything alive, and where all of it is: the ends of a pass's loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import sympy

from ....ir.switches import is_on
from ...program.axes import Term
from ...program.sizes import evaluate_size, nonnegative, tidy
from ...schedule.streams.masks import Bound, Span
from ..statements import Expr, Scope, binary, call, literal, unary
from .stream import Stream


@dataclass(frozen=True)
class Part:
    """A loop along the stream: its variable, what it is over (None: one block).

    masked: whether conditions of the body are asked; ragged: whether its last block may reach beyond the stream's end.
    """

    variable: str
    over: Expr | None
    masked: bool
    ragged: bool = False


class StreamBounds:
    """The loops of one pass."""

    def __init__(self, stream: Stream, span: Span) -> None:
        self.stream, self.span, self.context, self.roles = stream, span, stream.context, stream.roles
        self.axis = self.roles.stream
        self.size = self.context.sizes.text(self.axis.size)
        self.block = stream.emitter.tile.block(self.axis)
        self.ragged = not self._is_multiple()
        self.skipped: list[tuple[Expr, Expr]] = []
        """From where to where masks leave nothing to walk; known after `parts`."""

    @cached_property
    def variable(self) -> str:
        """That of all loops of the pass."""
        return self.context.names.fresh(f"{self.axis.name}_at")

    def parts(self, host: Scope) -> list[Part]:
        """Masked, whole and masked again, as far as each is needed."""
        if self.roles.keeps_stream:
            return [Part("", None, True)]
        self.context.sizes.require_countable(self.axis.size)
        self._begin, self._end = self._share(host)
        if not self.span.is_bounded:
            return self._unbounded(host)
        return self._bounded(host)

    def _is_multiple(self) -> bool:
        size, block = self.axis.size, self.stream.emitter.tile.block_sizes[self.axis]
        if evaluate_size(size, self.context.hints) % block or (not isinstance(size, int) and not is_on("multiples")):
            return False
        if not isinstance(size, int):
            self.context.sizes.guards[sympy.Eq(sympy.Mod(size, block), 0)] = None
        return True

    def _loop(self, start: Expr, stop: Expr, masked: bool) -> Part:
        stages = self.context.plan.stages
        pipelined = {"num_stages": literal(stages)} if stages > 1 else {}
        loop = call("tl.range", start, stop, self.block, **pipelined)
        # what a low bound, or a part of the stream, begins with may lie behind the end: no block is taken there, but
        # that is not proved
        begins_late = bool(self.span.lows) or self.roles.split is not None
        return Part(self.variable, loop, masked, masked and (self.ragged or begins_late))

    def _share(self, host: Scope) -> tuple[Expr, Expr]:
        """Where the program begins, and what it ends before: all of the stream, or whole blocks of it."""
        let, split = self.context.let, self.roles.split
        if split is None:
            return literal(0), self.size
        blocks = call("tl.cdiv", self.size, self.block)
        share = binary("*", call("tl.cdiv", blocks, self.context.sizes.text(split.size)), self.block)
        share = let(host.home(0), "share", share)
        number = self.stream.emitter.coords[split].base
        assert number is not None
        begin = let(host.home(0), "begin", binary("*", call("tl.cast", number, literal("tl.int32")), share))
        return begin, let(host.home(0), "end", call("tl.minimum", binary("+", begin, share), self.size))

    def _unbounded(self, host: Scope) -> list[Part]:
        if not self.ragged:
            return [self._loop(self._begin, self._end, masked=False)]
        whole = self.context.let(host, "whole", self._down(self._end))
        if self.roles.split is not None:  # a part behind the end of the stream has nothing
            whole = self.context.let(host, "whole", call("tl.maximum", whole, self._begin))
        return [self._loop(self._begin, whole, masked=False), self._loop(whole, self._end, masked=True)]

    def _bounded(self, host: Scope) -> list[Part]:
        let, span = self.context.let, self.span
        first, last = self._rows(host)
        # alive: where some row of the block has something; whole: where all rows have everything
        start = whole = self._begin
        if span.lows:
            alive = [self._low(b, first if b.row < 0 else last, host) for b in span.lows]
            start = let(host, "start", self._down(_largest([self._begin, *alive])))
        highs = [self._high(b, last if b.row > 0 else first, host) for b in span.highs]
        stop = let(host, "stop", _smallest([self._end, *highs])) if highs else self._end
        ends = [self._high(b, first if b.row > 0 else last, host) for b in span.highs]
        end = _smallest([self._end, *ends])
        end = end if all(map(_is_never_negative, span.highs)) else call("tl.maximum", end, literal(0))
        end = self._down(end) if ends or self.ragged else self._end
        if span.lows:
            full = [self._low(b, last if b.row < 0 else first, host) for b in span.lows]
            # a high bound may lie before the stream
            least = stop if all(map(_is_never_negative, span.highs)) else call("tl.maximum", stop, literal(0))
            whole = let(host, "whole_start", self._within(self._up(_largest(full)), start, least))
        end = let(host, "whole_stop", _largest([whole, end]))
        before = [(self._begin, start)] if span.lows else []
        behind = [(_largest([end, self._up(stop)]), self._end)] if highs else []
        self.skipped = [*before, *behind]
        parts = [self._loop(start, whole, masked=True)] if span.lows else []
        parts.append(self._loop(whole, end, masked=False))
        return [*parts, *([self._loop(end, stop, masked=True)] if ends or self.ragged else [])]

    # ------------------------------------------------------------------ the rows of the block
    def _rows(self, host: Scope) -> tuple[Expr, Expr]:
        """The first and the last row of the program, in 32 bits."""
        row, coords, tile = self.roles.row, self.stream.emitter.coords, self.stream.emitter.tile
        size, let = self.context.sizes.text(row.size), self.context.let
        base = coords[row].base
        if base is None:
            return literal(0), binary("-", size, literal(1))
        home = host.home(0)
        if (known := home.find("rows of the block")) is None:
            begin = let(home, "first", call("tl.cast", base, literal("tl.int32")))
            home.memo["rows of the block"] = begin
            end = binary("-", call("tl.minimum", binary("+", begin, tile.block(row)), size), literal(1))
            home.memo["last row of the block"] = let(home, "last", end)
            known = begin
        last = home.find("last row of the block")
        assert last is not None
        return known, last

    # ------------------------------------------------------------------ places along the stream
    def _high(self, bound: Bound, row: Expr, host: Scope) -> Expr:
        """One behind the last place: -S + row * R + c >= 0. Of a bound of rows: all places, or none."""
        if bound.by:
            return self._place(bound.row, bound, row, host, extra=1)
        return call("tl.where", binary(">=", self._sum(bound.row, bound, row, host), literal(0)), self.size, literal(0))

    def _low(self, bound: Bound, row: Expr, host: Scope) -> Expr:
        """The first place: S + row * R + c >= 0."""
        return self._place(-bound.row, bound, row, host, extra=0)

    def _place(self, sign: int, bound: Bound, row: Expr, host: Scope, extra: int) -> Expr:
        """sign * row + what is constant in the bound, towards the stream."""
        total = self._sum(sign, bound, row, host, -bound.by, extra)
        return self._inside(total, host) if bound.numbers else total

    def _sum(self, sign: int, bound: Bound, row: Expr, host: Scope, towards: int = 1, extra: int = 0) -> Expr:
        """sign * row + towards * what is constant in the bound + extra"""
        constant = bound.offset * towards + extra
        parts = [(sign, row), *((c * towards, self._number(c, term, host)) for c, term in bound.numbers)]
        total = _summed([(s, part) for s, part in parts if s])
        if not isinstance(constant, int):
            return binary("+", total, self.context.sizes.text(constant, "offset"))
        return binary("+" if constant > 0 else "-", total, literal(abs(constant))) if constant else total

    def _number(self, factor: int, term: Term, host: Scope) -> Expr:
        """A multiple of what data decides."""
        self.stream.reduce_depths([term])
        value = call("tl.cast", self.stream.values.value(term, host), literal("tl.int64"))
        return value if abs(factor) == 1 else binary("*", value, literal(abs(factor)))

    def _inside(self, place: Expr, host: Scope) -> Expr:
        """A place that data decides, of 64 bits, as one of the stream or the one behind it."""
        inside = call("tl.minimum", call("tl.maximum", place, literal(0)), self.size)
        if (known := host.find(inside.text)) is not None:
            return known
        host.memo[inside.text] = place = self.context.let(host, "place", call("tl.cast", inside, literal("tl.int32")))
        return place

    def _down(self, place: Expr) -> Expr:
        """The multiple of the block below."""
        return place if place.text == "0" else binary("*", binary("//", place, self.block), self.block)

    def _up(self, place: Expr) -> Expr:
        """The multiple of the block above; places below zero count as zero."""
        return binary("*", call("tl.cdiv", call("tl.maximum", place, literal(0)), self.block), self.block)

    def _within(self, place: Expr, start: Expr, stop: Expr) -> Expr:
        """Between where the stream begins and the block in which it ends."""
        end = binary("*", call("tl.cdiv", stop, self.block), self.block)
        return call("tl.minimum", call("tl.maximum", place, start), call("tl.maximum", end, start))


def _is_never_negative(bound: Bound) -> bool:
    """One behind the last place is none below zero."""
    return bound.row >= 0 and not bound.numbers and nonnegative(tidy(bound.offset + 1))


def _summed(parts: Sequence[tuple[int, Expr]]) -> Expr:
    """The sum of parts with their signs."""
    total: Expr | None = None
    for sign, part in parts:
        first = part if sign > 0 else unary("-", part)
        total = first if total is None else binary("+" if sign > 0 else "-", total, part)
    return literal(0) if total is None else total


def _smallest(places: Sequence[Expr]) -> Expr:
    return reduce(lambda a, b: call("tl.minimum", a, b), places)


def _largest(places: Sequence[Expr]) -> Expr:
    return reduce(lambda a, b: call("tl.maximum", a, b), places)
