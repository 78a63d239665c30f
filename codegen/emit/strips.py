"""Rows too long for one program: strips of them walk the same rows, and tell each other what they reduce along a row.

A row's reduction goes through memory as one word, zero while nobody knows it. A program that finds zero computes it and
stores the word: nobody waits, and whoever computes it finds the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.types import product
from ..program.axes import Term
from ..program.sizes import blocks, tidy
from .final_reduction import Finishing
from .loops import Accumulate, Expr, For, If, Let, Statement, Store, binary, call, literal, name, total


class Strips(Finishing):
    """The order of the rows, and the words."""

    def _rotated_item(self, item: str) -> Expr:
        """The item to work on; where strips share rows, each begins with rows of its own."""
        if not (self.plan.shared and self._has_strips()):
            return name(item)
        step = {"step": literal(self.plan.step)} if self.plan.step > 1 else {}
        turn = call("rotated", name(item), *self.span[:2], name("strip"), self._strip_count(), **step)
        return self._let(self.body, "turn", turn)

    def _reduce_once_for_strips(self, inner: Sequence[Term], emitted: Sequence[Statement]) -> None:
        """if nobody knows: the pass over the row, and tell the programs of the other strips."""
        found = [self.body.memo[r].text for r in inner]
        own = {*found, *self.lane_labels}
        computing: list[Statement] = []
        for statement in emitted:
            apart = isinstance(statement, For) or (isinstance(statement, Let) and statement.name in own)
            (computing if apart else self.body.body).append(_as_reassignment(statement, found))
        unknown = []
        for label in found:
            word, place = name(self.names.fresh(f"{label}_word")), self._word_address(label)
            self.body.body += [Let(word.text, call("known", place)), Let(label, call("of_word", word))]
            computing.append(Store(place, call("word_of", name(label)), None))
            unknown.append(binary("==", word, literal(0)))
        anything = total("|", unknown)
        assert anything is not None
        self.body.body.append(If(anything, computing))

    def _word_address(self, label: str) -> Expr:
        """Where the word of this row is."""
        block = self.plan.tile[self.plan.row[0]]
        pointer = self._zeroed_words(f"{label}_known", tidy(product([blocks(self.plan.items or 1, block), block])))
        self.row_words.append(pointer)
        return binary("+", pointer, name("turn"))


def _as_reassignment(statement: Statement, found: Sequence[str]) -> Statement:
    """The definition of a name that has a value already."""
    if isinstance(statement, Let) and statement.name in found:
        return Accumulate(statement.name, "=", statement.value, statement.comment)
    return statement
