"""Reductions along a row in chunks: an accumulator with lanes takes the chunks in, and is folded after the loops."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ...program.axes import Term
from ..context import Context, default_name, name_of
from ..mathematics import TL, register_dtype
from ..names import identifier
from ..statements import Accumulate, Expr, Scope, binary, call, literal, name
from ..values import Values
from .folding import Folding
from .folds import take_in


@dataclass(eq=False)
class LaneAccumulators:
    """`labels`: all accumulators of plain reductions; `unfolded`: those of the loops that are open."""

    context: Context
    folding: Folding
    values: Values
    labels: list[str] = field(default_factory=list)
    unfolded: list[tuple[Term, str]] = field(default_factory=list)

    def accumulate(self, term: Term, chunk: Scope) -> None:
        """A reduction takes a chunk in; beside the maximum of a softmax, its sum does, too."""
        total = next((total for total, top in self.context.plan.online.items() if top is term), None)
        if total is None:
            self._accumulate_plain(term, chunk)
        else:
            self._accumulate_online(term, total, chunk)

    def fold(self, reduced: Collection[object]) -> None:
        """After the loops: the values of what they reduced, from its lanes."""
        for term, label in self.unfolded:
            self._define(term, self.context.round_reduction(term, self.folding.fold(term, name(label))))
        self.unfolded.clear()
        for total, top in self.context.plan.online.items():
            if top in reduced:
                self._fold_online(top, total)

    def _accumulate_plain(self, term: Term, chunk: Scope) -> None:
        value = self.values.argument_of_reduction(term, chunk)
        label = self.context.names.fresh(f"{identifier(name_of(term)) or term.op}_lanes")
        lanes = self.folding.tile.lanes(term.args[0].axes)
        self.context.body.body.append(self.folding.accumulator(term, label, lanes))
        self.labels.append(label)
        self.unfolded.append((term, label))
        chunk.body.append(take_in(term, label, value, self.context.comment(term)))

    # ------------------------------------------------------------------ a softmax in one pass
    def _accumulate_online(self, top: Term, total: Term, chunk: Scope) -> None:
        """Per lane, the maximum so far and the sum relative to it; finite at first: -inf - -inf never arises."""
        context, body = self.context, self.context.body
        value = context.let(chunk, "value", self.values.argument_of_reduction(top, chunk))
        tops, sums = (context.names.fresh(f"{identifier(name_of(t)) or default_name(t)}_lanes") for t in (top, total))
        dtype = literal(TL[register_dtype(top.dtype)])
        shape = self.folding.tile.shape(top.args[0].axes)
        start = literal("-3.4028234663852886e38" if top.dtype == "f32" else "-1.7976931348623157e308")
        body.memo["lanes", top] = body.define(tops, call("tl.full", shape, start, dtype))
        body.memo["lanes", total] = body.define(sums, call("tl.full", shape, literal("0.0"), dtype))
        # The sum so far is relative to the maximum before: it is scaled before the maximum changes
        higher = context.let(chunk, "higher", call("larger", name(tops), value))
        scaled = binary("*", name(sums), self._exp(top, binary("-", name(tops), higher)))
        grown = binary("+", scaled, self._exp(top, binary("-", value, higher)))
        chunk.body.append(Accumulate(sums, "=", grown, context.comment(total)))
        chunk.body.append(Accumulate(tops, "=", higher, context.comment(top)))

    def _fold_online(self, top: Term, total: Term) -> None:
        """Maximum and sum of the row; a row of nothing but -inf ends as in torch, with NaN for the sum."""
        let, body = self.context.let, self.context.body
        tops, sums = body.memo["lanes", top], body.memo["lanes", total]
        highest = let(body, "highest", self.folding.fold(top, tops))
        relative = binary("*", sums, self._exp(top, binary("-", tops, highest)))
        added = let(body, "added", self.folding.fold(total, relative))
        is_empty = binary("==", added, literal("0.0"))
        for term, value, otherwise in ((top, highest, 'float("-inf")'), (total, added, 'float("nan")')):
            self._define(term, call("tl.where", is_empty, literal(otherwise), value))

    def _define(self, term: Term, value: Expr) -> None:
        body, label = self.context.body, self.context.names.fresh(name_of(term), default_name(term))
        body.memo[term] = body.define(label, value)

    def _exp(self, like: Term, x: Expr) -> Expr:
        return self.values.rules["exp"](like.dtype, x)
