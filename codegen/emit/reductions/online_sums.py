"""sum(exp(x - max(x))) along a row in chunks, in the pass of the maximum: relative to the maximum so far.

What a thread has of a chunk has one maximum, and the sum so far is scaled once for all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ....ir.types import ITEMSIZE
from ...program.axes import Axis, Term, terms_below
from ...program.sizes import evaluate_size
from ..context import Context, default_name, name_of
from ..mathematics import TL, exp_below, register_dtype
from ..names import identifier
from ..statements import ATOM, Accumulate, Expr, Scope, binary, call, literal, name
from ..values import Values
from .folding import Folding
from .folds import fold_function

ACCESS = 16
"""Bytes that one thread reads at once."""
LOWEST = {"f32": "-3.4028234663852886e38", "f64": "-1.7976931348623157e308"}
"""Where a maximum begins: finite, so that -inf - -inf never arises."""


@dataclass(frozen=True)
class Columns:
    """A chunk of columns as [accesses, rows read at once, columns]: with one thread's elements along the first."""

    block: Expr
    rows: int
    columns: Expr

    @property
    def shape(self) -> Expr:
        accesses = binary("//", self.block, literal(self.rows))
        names = self.block.names | self.columns.names
        return Expr(f"[{accesses}, {self.rows}, {self.columns}]", names=names)

    @property
    def lanes(self) -> Expr:
        return Expr(f"[{self.rows}, {self.columns}]", names=self.columns.names)

    def fold(self, term: Term, parts: Expr) -> Expr:
        """What each thread has of a column, folded."""
        return call(fold_function(term), parts, literal(0))

    def spread(self, value: Expr) -> Expr:
        """A value of each thread beside all that it has."""
        return Expr(f"{value.inside(ATOM)}[None, :, :]", names=value.names)


@dataclass(frozen=True)
class Parts:
    """A chunk as [accesses, threads, elements of one access]: with one thread's elements along the outer two."""

    block: Expr
    threads: int
    access: int

    @property
    def shape(self) -> Expr:
        accesses = binary("//", self.block, literal(self.threads * self.access))
        return Expr(f"[{accesses}, {self.threads}, {self.access}]", names=accesses.names)

    @property
    def lanes(self) -> Expr:
        return Expr(f"[{self.threads}]")

    def fold(self, term: Term, parts: Expr) -> Expr:
        """What each thread has, folded."""
        return call(fold_function(term), call(fold_function(term), parts, literal(2)), literal(0))

    def spread(self, value: Expr) -> Expr:
        """A value of each thread beside all that it has."""
        return Expr(f"{value.inside(ATOM)}[None, :, None]", names=value.names)


@dataclass(eq=False)
class OnlineSums:
    """Pairs of a maximum and the sum that rides along. `labels`: their accumulators."""

    context: Context
    folding: Folding
    values: Values
    labels: list[str] = field(default_factory=list)

    def accumulate(self, top: Term, total: Term, value: Expr, chunk: Scope) -> None:
        """Both take a chunk in."""
        context, body = self.context, self.context.body
        parts = self.parts(top)
        value = context.let(chunk, "value", value)
        if parts is not None:
            value = context.let(chunk, "parts", call("tl.reshape", value, parts.shape))
        shape = self.folding.tile.shape(top.args[0].axes) if parts is None else parts.lanes
        tops, sums = (context.names.fresh(f"{identifier(name_of(t)) or default_name(t)}_lanes") for t in (top, total))
        dtype = literal(TL[register_dtype(top.dtype)])
        note = "" if parts is None else "one for each thread"
        body.memo["lanes", top] = body.define(tops, call("tl.full", shape, literal(LOWEST[top.dtype]), dtype), note)
        body.memo["lanes", total] = body.define(sums, call("tl.full", shape, literal("0.0"), dtype))
        self.labels += [tops, sums]
        # The sum so far is relative to the maximum before: it is scaled before the maximum changes
        highest = value if parts is None else parts.fold(top, value)
        higher = context.let(chunk, "higher", call("larger", name(tops), highest))
        scaled = binary("*", name(sums), self._exp(top, binary("-", name(tops), higher)))
        relative = self._exp(top, binary("-", value, higher if parts is None else parts.spread(higher)))
        added = relative if parts is None else parts.fold(total, relative)
        chunk.body.append(Accumulate(sums, "=", binary("+", scaled, added), context.comment(total)))
        chunk.body.append(Accumulate(tops, "=", higher, context.comment(top)))

    def fold(self, top: Term, total: Term, scope: Scope) -> tuple[Expr, Expr]:
        """The lanes of both folded: the maximum, and the sum relative to it."""
        let, memo = self.context.let, self.context.body.memo
        tops = memo["lanes", top]
        highest = let(scope, "highest", self.folding.fold(top, tops))
        relative = binary("*", memo["lanes", total], self._exp(top, binary("-", tops, highest)))
        return highest, let(scope, "added", self.folding.fold(total, relative))

    def results(self, top: Term, total: Term, highest: Expr, added: Expr) -> Iterator[tuple[Term, Expr]]:
        """Maximum and sum of the row, relative to the maximum, or to zero where that is asked for if it is infinite."""
        # A row of nothing but -inf ends as in torch: with NaN for a sum relative to its maximum
        is_empty = binary("==", added, literal("0.0"))
        yield top, call("tl.where", is_empty, literal('float("-inf")'), highest)
        if total.args[0].args[0].args[1] is top:
            yield total, call("tl.where", is_empty, literal('float("nan")'), added)
        else:
            found = self.context.body.memo[top]
            is_infinite = binary("==", call("tl.abs", found), literal('float("inf")'))
            yield total, call("tl.where", is_infinite, self.values.rules["exp"](top.dtype, found), added)

    def parts(self, reduction: Term) -> Parts | Columns | None:
        """The chunk by threads, where each keeps whole accesses of it; None where a thread has lanes of many places."""
        context, plan, tile = self.context, self.context.plan, self.folding.tile
        if plan.order[-1:] != tile.dims[-1:]:
            return None
        axis = tile.dims[-1]
        loads = [t for t in terms_below([reduction.args[0]]) if t.op == "load" and axis in t.axes]
        access = min((ACCESS // ITEMSIZE[t.dtype] for t in loads), default=1)
        threads, lanes = plan.warps * context.target.warp, tile.block_sizes[axis]
        if len(tile.dims) == 2 and tile.dims[:1] == reduction.param:
            rows, block = threads * access // lanes, tile.block_sizes[tile.dims[0]]
            fits = access > 1 and 0 < rows < block and all(self._is_wide(t, axis, access) for t in loads)
            return Columns(tile.block(tile.dims[0]), rows, tile.block(axis)) if fits else None
        if tile.dims != reduction.param:
            return None
        fits = access > 1 and lanes >= access * threads and all(self._is_wide(t, axis, access) for t in loads)
        return Parts(tile.block(axis), threads, access) if fits else None

    def _is_wide(self, load: Term, axis: Axis, access: int) -> bool:
        """Rows begin at multiples of an access, or are read from such a boundary on."""
        place, slide, hints = load.param.place, self.context.plan.slide, self.context.hints
        if slide is not None:
            return slide.holds(place, not load.args)
        steps = [place.offset, *(c for a, c in place.terms if a is not axis)]
        return dict(place.terms).get(axis) == 1 and all(evaluate_size(n, hints) % access == 0 for n in steps)

    def _exp(self, like: Term, x: Expr) -> Expr:
        """exp of a difference to a maximum."""
        target = self.context.target
        return exp_below(target.kind, target.fast, like.dtype, x)
