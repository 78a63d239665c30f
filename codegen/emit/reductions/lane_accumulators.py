"""Reductions along a row in chunks: an accumulator with lanes takes the chunks in, and is folded after the loops."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from ...program.axes import Term
from ..context import Context, default_name, name_of
from ..names import identifier
from ..statements import Expr, Scope, call, name
from ..values import Values
from .folding import Folding
from .folds import take_in
from .online_sums import OnlineSums


@dataclass(eq=False)
class LaneAccumulators:
    """`labels`: all accumulators of plain reductions; `unfolded`: those of the loops that are open."""

    context: Context
    folding: Folding
    values: Values
    online: OnlineSums
    labels: list[str] = field(default_factory=list)
    unfolded: list[tuple[Term, str]] = field(default_factory=list)

    def accumulate(self, term: Term, chunk: Scope) -> None:
        """A reduction takes a chunk in; beside the maximum of a softmax, its sum does, too."""
        if term in self._extremes:
            self.online.accumulate(term, chunk)
        else:
            self._accumulate_plain(term, chunk)

    @property
    def _extremes(self) -> list[Term]:
        """Those that sums ride along with."""
        return list(dict.fromkeys(online.top for online in self.context.plan.online.values()))

    def fold(self, reduced: Collection[object]) -> None:
        """After the loops: the values of what they reduced, from its lanes."""
        for term, label in self.unfolded:
            self._define(term, self.context.round_reduction(term, self.folding.fold(term, name(label))))
        self.unfolded.clear()
        for top in (t for t in self._extremes if t in reduced):
            folded = self.online.fold(top, self.context.body)
            for term, value in self.online.results(top, folded):
                self._define(term, value)

    def fold_piece(self, scope: Scope) -> Iterator[tuple[Term, Expr]]:
        """After loops over a piece of the row: the reductions, and what their lanes fold to."""
        for term, label in self.unfolded:
            yield term, self.folding.fold_lanes(term, name(label))
        self.unfolded.clear()
        for top in self._extremes:
            if ("lanes", top) in self.context.body.memo:
                yield from self.online.fold(top, scope).items()

    def take_lanes(self, term: Term, lanes: Expr) -> None:
        """What remains to be folded of a reduction."""
        if term in self.context.plan.online or term in self._extremes:
            self.context.body.memo["lanes", term] = lanes
        else:
            self.unfolded.append((term, lanes.text))

    def _accumulate_plain(self, term: Term, chunk: Scope) -> None:
        value = self.values.argument_of_reduction(term, chunk)
        label = self.context.names.fresh(f"{identifier(name_of(term)) or term.op}_lanes")
        lanes = self.folding.tile.lanes(term.args[0].axes)
        # Beside a maximum of each thread, a sum of each thread: registers are for what comes by
        parts = self.online.parts(term) if self.context.plan.online else None
        if parts is not None:
            value = parts.fold(term, call("tl.reshape", value, parts.shape))
        own = parts.lanes if parts is not None else None
        self.context.body.body.append(self.folding.accumulator(term, label, lanes, own))
        self.labels.append(label)
        self.unfolded.append((term, label))
        chunk.body.append(take_in(term, label, value, self.context.comment(term)))

    def _define(self, term: Term, value: Expr) -> None:
        body, label = self.context.body, self.context.names.fresh(name_of(term), default_name(term))
        body.memo[term] = body.define(label, value)
