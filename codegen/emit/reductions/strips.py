"""Rows too long for one program: strips of them walk the same rows, and tell each other what they reduce along a row.

A row's reduction goes through memory as one word, zero until some program has computed it. A program that finds zero
computes it and stores the word: none waits, and all that compute it find the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ....ir.types import product
from ...program.axes import Term
from ...program.sizes import cdiv, tidy
from ..access.buffers import Buffers
from ..access.tile_axes import TileAxes
from ..context import Context
from ..statements import Accumulate, Expr, For, If, Let, Statement, Store, binary, call, literal, name, total
from ..walk import Walk
from .lane_accumulators import LaneAccumulators


@dataclass(eq=False)
class RowWords:
    """`pointers`: words by which strips tell each other what they reduced along a row."""

    context: Context
    buffers: Buffers
    tile: TileAxes
    walk: Walk
    lanes: LaneAccumulators
    pointers: list[Expr] = field(default_factory=list)

    def reduce_once(self, inner: Sequence[Term], emitted: Sequence[Statement]) -> None:
        """Where a word is missing: the pass over the row, and the words for the programs of the other strips."""
        body = self.context.body
        labels = [body.memo[r].text for r in inner]
        computing: list[Statement] = []
        # Only the pass and its accumulators are conditional; addresses and masks serve what follows, too
        for statement in emitted:
            is_accumulator = isinstance(statement, Let) and statement.name in {*labels, *self.lanes.labels}
            target = computing if isinstance(statement, For) or is_accumulator else body.body
            target.append(_as_reassignment(statement, labels))
        # Each word is read before the pass, which is left out where all are there
        missing = []
        for label in labels:
            word, place = name(self.context.names.fresh(f"{label}_word")), self._word_address(label)
            body.body += [Let(word.text, call("known", place)), Let(label, call("of_word", word))]
            computing.append(Store(place, call("word_of", name(label)), None))
            missing.append(binary("==", word, literal(0)))
        condition = total("|", missing)
        assert condition is not None
        body.body.append(If(condition, computing))

    def clearing_loops(self) -> list[Statement]:
        """Zeros for the next launch."""
        (axis,) = self.context.plan.row
        loops: list[Statement] = []
        for pointer in self.pointers:
            place = binary("+", binary("+", pointer, name("first")), self.tile.lane(axis))
            zeros = call("tl.zeros", self.tile.shape([axis]), literal("tl.int32"))
            over = call("range", literal(0), self.walk.total, self.tile.block(axis))
            loops.append(For("first", over, [Store(place, zeros, None)]))
        return loops

    def _word_address(self, label: str) -> Expr:
        """The place of the word of this row."""
        plan = self.context.plan
        block = plan.tile[plan.row[0]]
        count = tidy(product([cdiv(plan.items or 1, block), block]))
        self.pointers.append(self.buffers.add_zeroed_words(f"{label}_known", count))
        return binary("+", self.pointers[-1], name("turn"))


def _as_reassignment(statement: Statement, labels: Sequence[str]) -> Statement:
    """The definition of a name that has a value already."""
    if isinstance(statement, Let) and statement.name in labels:
        return Accumulate(statement.name, "=", statement.value, statement.comment)
    return statement
