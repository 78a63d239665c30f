"""What blocks that a mask skips add to the sums of a walk: NaN, where a row or a place has nothing left, else 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...program.axes import Term
from ...program.sizes import evaluate_size, power_of_two
from ..statements import Accumulate, Expr, For, Scope, binary, call, literal, name
from .stream import Stream
from .values import uses_of

MOST = 1024
"""Places at once: one number each, where a turn of the walk has tiles."""


class SkippedPlaces:
    """Loops over the numbers of places that are skipped. ranges: the first of some, and the one behind them."""

    def __init__(self, stream: Stream, ranges: Sequence[tuple[Expr, Expr]]) -> None:
        self.stream, self.ranges, self.context = stream, ranges, stream.context
        self.axis = stream.roles.stream

    def add(self, added: Mapping[Term, Term], host: Scope) -> None:
        """To each sum what it would have of such a place."""
        self.stream.reduce_depths(added.values())
        self.stream.values.uses = uses_of([*added.values()], self.stream.labels)
        values = dict.fromkeys(added.values())
        along = [t for t in values if self.axis in t.axes]
        lost = self._walked(along, host) if along else {}
        for total, each in added.items():
            dims = self.stream.shapes.dims(total)
            value = lost[each] if each in lost else self._of_rows(each, host)
            with self.stream.shapes.of(*dims):
                value = self.stream.shapes.spread(value, self.stream.shapes.dims(each))
            host.body.append(Accumulate(self.stream.labels[total], "+=", value))

    def _of_rows(self, each: Term, host: Scope) -> Expr:
        """It is the same at every place: one counts, if there is one."""
        with self.stream.shapes.of(*self.stream.shapes.dims(each)):
            value = self.stream.values.value(each, host)
        some = [binary("<", first, behind) for first, behind in self.ranges]
        is_skipped = some[0] if len(some) == 1 else binary("|", *some)
        return self.context.let(host, "lost", call("tl.where", is_skipped, value, literal("0.0")))

    def _walked(self, along: Sequence[Term], host: Scope) -> dict[Term, Expr]:
        """The sums of what varies along the stream."""
        tile, let, fresh = self.stream.emitter.tile, self.context.let, self.context.names.fresh
        lanes = min(MOST, power_of_two(evaluate_size(self.axis.size, self.context.hints)))
        with tile.replaced_by(self.axis, lanes, "SKIPPED"):
            block = tile.block(self.axis)
            zeros = call("tl.zeros", Expr(f"[{block.text}]", names=block.names), literal("tl.float32"))
            lost = {t: host.define(fresh("lost"), zeros, "NaN, where a row that is skipped has nothing") for t in along}
            for first, behind in self.ranges:
                variable = fresh("skipped_at")
                scope = Scope(2, host)
                self.stream.shapes.set_stream(name(variable), scope, 2, masked=True)
                self._take_in(lost, scope)
                host.body.append(For(variable, call("tl.range", first, behind, block), scope.body))
        return {t: let(host, "lost", call("tl.sum", label, literal(0))) for t, label in lost.items()}

    def _take_in(self, lost: Mapping[Term, Expr], scope: Scope) -> None:
        """Places that are walked as well add the same: a block may reach into these."""
        for term, label in lost.items():
            value = self.stream.values.value(term, scope)
            mask = self.stream.shapes.mask_of_stream(term)
            assert mask is not None
            scope.body.append(Accumulate(label.text, "+=", call("tl.where", mask, value, literal("0.0"))))
