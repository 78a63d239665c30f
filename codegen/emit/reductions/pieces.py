"""Rows that a team of programs reads together: each reduces its piece, and finds what the others reduced in memory.

A program waits a while for the pieces of others, then reduces them itself: no order of programs is taken for granted,
and whoever reduces a piece finds the same bits. Pieces are put together as lanes are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ....ir.types import product
from ...program.axes import Axis, Sink, Term
from ...program.sizes import cdiv, tidy
from ...schedule.pieces import divided_axis
from ..access.buffers import Buffers
from ..context import Context
from ..loop_nests import LoopNests
from ..names import MOST
from ..statements import Accumulate, Expr, For, If, Let, Scope, Statement, Store, binary, call, literal, name
from ..walk import Walk
from .folds import accumulator_dtype
from .lane_accumulators import LaneAccumulators
from .partial_slots import Partial, PartialSlots

PATIENCE = 1000
"""Times that a program looks for the pieces of others, about a microsecond each."""
PATIENCE_OF_INTERPRETER = 0
"""Its programs run one after the other: what is missing stays so."""


@dataclass(eq=False)
class RowPieces:
    """`words`: where programs count the pieces of each item that are reduced."""

    context: Context
    buffers: Buffers
    walk: Walk
    nests: LoopNests
    slots: PartialSlots
    lanes: LaneAccumulators
    words: list[Expr] = field(default_factory=list)

    # ------------------------------------------------------------------ a pass
    def emit(self, work: Sequence[Term | Sink], emit_loops: Callable[[], None]) -> None:
        """A pass over this program's own piece; of what it reduces, over the pieces of late programs, too."""
        self.context.sizes.require_below(self.context.plan.items or 1, MOST // self.context.plan.pieces)
        if not any(isinstance(item, Term) for item in work):
            with self.nests.along(*self._span(name("own"))):
                emit_loops()
            return
        body = self.context.body
        before, body.body = body.body, []
        with self.nests.along(*self._span(name("piece"))):
            emit_loops()
        emitted, body.body = body.body, before
        # Only the loops and their accumulators are those of a piece; addresses and masks serve what follows, too
        labels, computing = {*self.lanes.labels, *self.lanes.online.labels}, list[Statement]()
        for statement in emitted:
            is_accumulator = isinstance(statement, Let) and statement.name in labels
            (computing if isinstance(statement, For) or is_accumulator else body.body).append(statement)
        partials = self._store_folded(computing)
        self._reduce_missing(partials[0].term, computing)
        self._read_as_lanes(partials)
        self.lanes.fold(work)

    def _span(self, piece: Expr) -> tuple[Axis, Expr, Expr]:
        """The axis that is divided, and where a piece begins and ends: whole blocks."""
        plan, sizes = self.context.plan, self.context.sizes
        axis = divided_axis(plan.order, plan.row)
        block = plan.tile.get(axis, 1)
        sizes.require_below(axis.size, 1 << 30)
        share = sizes.fixed("PIECE", tidy(product([cdiv(cdiv(axis.size, block), plan.pieces), block])))
        if axis is plan.order[-1]:  # side by side: accesses begin where a piece does
            sizes.wide |= share.names
        first = binary("*", piece, share)
        return axis, first, call("tl.minimum", binary("+", first, share), sizes.text(axis.size))

    # ------------------------------------------------------------------ pieces in memory
    def _store_folded(self, computing: list[Statement]) -> list[Partial]:
        """What the accumulators hold of a piece, folded, in slots of memory."""
        scope = Scope(self.context.body.level, self.context.body, computing)
        return [self._store(term, value, scope) for term, value in self.lanes.fold_piece(scope)]

    def _store(self, term: Term, value: Expr, scope: Scope) -> Partial:
        plan, lanes = self.context.plan, self.slots.folding.tile.lanes(term.axes)
        label = self.context.name_of_reduction(term)
        value = self.context.let(scope, f"{label}_piece", value)
        width = product(self.slots.folding.tile.block_sizes[a] for a in lanes)
        count = tidy(product([plan.items or 1, plan.pieces, width]))
        partial = Partial(term, value.text, lanes)
        partial.pointer = self.buffers.add_partial_sums(label, accumulator_dtype(term), count)
        scope.body.append(self.slots.store(partial, self._slot(name("piece")), value))
        return partial

    def _slot(self, piece: Expr) -> Expr:
        return binary("+", binary("*", name("item"), self._pieces()), piece)

    def _reduce_missing(self, term: Term, computing: list[Statement]) -> None:
        """The own piece; then those of others, as long as they are missing in spite of patience."""
        body, sizes, plan = self.context.body.body, self.context.sizes, self.context.plan
        count = tidy(product([cdiv(plan.items or 1, self._cleared), self._cleared]))
        words = self.buffers.add_zeroed_words(f"{self.context.name_of_reduction(term)}_pieces", count)
        self.words.append(words)
        missing = self.context.names.fresh("missing")
        in_order = self.context.target.kind == "interpret"
        patience = sizes.fixed("PATIENCE", PATIENCE_OF_INTERPRETER if in_order else PATIENCE)
        asked = call("are_missing", binary("+", words, name("item")), name("distance"), self._pieces(), patience)
        piece = Let("piece", binary("%", binary("+", name("own"), name("distance")), self._pieces()))
        turn = If(name(missing), [piece, *computing, Accumulate(missing, "=", asked)])
        body += [Let(missing, literal("True")), For("distance", call("tl.range", literal(0), self._pieces()), [turn])]

    def _read_as_lanes(self, partials: Sequence[Partial]) -> None:
        """All pieces side by side, from L2, where other programs have stored them."""
        tile = self.slots.folding.tile
        shape = ", ".join(":" if a in self.context.plan.row else "None" for a in tile.dims)
        each = call("tl.arange", literal(0), self._pieces())
        each = Expr(each.text + (f"[{shape}]" if len(tile.dims) > 1 else ""), names=each.names)
        slot = self.context.let(self.context.body, "slot", self._slot(each))
        for partial in partials:
            loaded = call("tl.load", self.slots.address(partial, slot), cache_modifier='".cg"')
            label = self.context.names.fresh(f"{self.context.name_of_reduction(partial.term)}_of_pieces")
            self.lanes.take_lanes(partial.term, self.context.body.define(label, loaded))

    # ------------------------------------------------------------------ the end
    def clear(self) -> None:
        """The last program leaves zeros for the next launch."""
        context, tile = self.context, self.slots.folding.tile
        arrived = self.buffers.add_zeroed_words("arrived", 1)
        scope, (*_, axis) = Scope(context.top.level, context.top), context.plan.order
        for place in (binary("+", words, name("first")) for words in self.words):
            over = call("range", literal(0), self.walk.total, *([tile.block(axis)] if axis in tile.dims else []))
            zeros, lane = literal(0), None
            if axis in tile.dims:
                zeros, lane = call("tl.zeros", tile.shape([axis]), literal("tl.int32")), tile.lane(axis)
            scope.body.append(For("first", over, [Store(binary("+", place, lane) if lane else place, zeros, None)]))
        everyone = binary("*", self.walk.programs(), self._pieces())
        context.top.body.append(If(call("last_to_arrive", arrived, everyone), scope.body))

    @property
    def _cleared(self) -> int:
        """Words that are cleared side by side."""
        return self.context.plan.tile.get(self.context.plan.order[-1], 1)

    def _pieces(self) -> Expr:
        return self.context.sizes.fixed("PIECES", self.context.plan.pieces)
