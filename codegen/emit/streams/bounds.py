"""Where along the stream a block of rows has anything alive, and where all of it is: the ends of a pass's loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import sympy

from ....ir.switches import is_on
from ...program.axes import Term
from ...program.sizes import evaluate_size, nonnegative, tidy
from ...schedule.streams.masks import Bound, Span
from ..statements import Expr, Scope, binary, call, literal, unary
from .stream import Stream


@dataclass(frozen=True)
class Part:
    """A loop along the stream: its variable, what it is over (None: one block), and whether masks are needed."""

    variable: str
    over: Expr | None
    masked: bool


class StreamBounds:
    """The loops of one pass."""

    def __init__(self, stream: Stream, span: Span) -> None:
        self.stream, self.span, self.context, self.roles = stream, span, stream.context, stream.roles
        self.axis = self.roles.stream
        self.size = self.context.sizes.text(self.axis.size)
        self.block = stream.emitter.tile.block(self.axis)
        self.ragged = not self._is_multiple()

    def parts(self, host: Scope) -> list[Part]:
        """Masked, whole and masked again, as far as each is needed."""
        if self.roles.keeps_stream:
            return [Part("", None, True)]
        self.context.sizes.require_countable(self.axis.size)
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
        variable = self.context.names.fresh(f"{self.axis.name}_at")
        return Part(variable, call("tl.range", start, stop, self.block, **pipelined), masked)

    def _unbounded(self, host: Scope) -> list[Part]:
        zero = literal(0)
        if not self.ragged:
            return [self._loop(zero, self.size, masked=False)]
        whole = self.context.let(host, "whole", binary("*", binary("//", self.size, self.block), self.block))
        return [self._loop(zero, whole, masked=False), self._loop(whole, self.size, masked=True)]

    def _bounded(self, host: Scope) -> list[Part]:
        let, span = self.context.let, self.span
        first, last = self._rows(host)
        # alive: where some row of the block has something; whole: where all rows have everything
        start = whole = literal(0)
        if span.lows:
            alive = [self._low(b, first if b.row < 0 else last, host) for b in span.lows]
            start = let(host, "start", self._down(_largest([literal(0), *alive])))
        highs = [self._high(b, last if b.row > 0 else first, host) for b in span.highs]
        stop = let(host, "stop", _smallest([self.size, *highs])) if highs else self.size
        ends = [self._high(b, first if b.row > 0 else last, host) for b in span.highs]
        end = _smallest([self.size, *ends])
        end = end if all(map(_is_never_negative, span.highs)) else call("tl.maximum", end, literal(0))
        end = self._down(end) if ends or self.ragged else self.size
        if span.lows:
            full = [self._low(b, last if b.row < 0 else first, host) for b in span.lows]
            whole = let(host, "whole_start", self._within(self._up(_largest(full)), start, stop))
        end = let(host, "whole_stop", _largest([whole, end]) if span.lows or highs else end)
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
        """One behind the last place: -S + row * R + c >= 0."""
        return self._place(bound.row, bound, row, host, extra=1)

    def _low(self, bound: Bound, row: Expr, host: Scope) -> Expr:
        """The first place: S + row * R + c >= 0."""
        return self._place(-bound.row, bound, row, host, extra=0)

    def _place(self, sign: int, bound: Bound, row: Expr, host: Scope, extra: int) -> Expr:
        """sign * row + what is constant in the bound, towards the stream."""
        towards = -bound.by
        constant = bound.offset * towards + extra
        parts = [(sign, row), *((c * towards, self._number(c, term, host)) for c, term in bound.numbers)]
        total = _summed([(s, part) for s, part in parts if s])
        if not isinstance(constant, int):
            total = binary("+", total, self.context.sizes.text(constant, "offset"))
        elif constant:
            total = binary("+" if constant > 0 else "-", total, literal(abs(constant)))
        return self._inside(total, host) if bound.numbers else total

    def _number(self, factor: int, term: Term, host: Scope) -> Expr:
        """A multiple of what data decides."""
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
