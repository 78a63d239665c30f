"""Final reductions: every program stores its partial sum; the last to arrive adds them, in order, level by level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...program.axes import Term, terms_below
from ..access.aligned_rows import AlignedRows
from ..context import FINISH, Context
from ..loop_nests import LoopNests
from ..statements import Expr, If, Scope, call, name
from ..stores import Stores
from .arrivals import Level, arrival_levels
from .direct_partials import DirectPartials
from .folding import Folding
from .folds import as_result, take_in
from .partial_slots import PartialSlots
from .strips import RowWords


@dataclass(eq=False)
class FinalReductions:
    """Accumulators of the walk, and the stores of what depends on them."""

    context: Context
    folding: Folding
    rows: AlignedRows
    nests: LoopNests
    stores: Stores
    slots: PartialSlots
    directs: DirectPartials
    words: RowWords

    def accumulate(self, term: Term, scope: Scope) -> None:
        """A final reduction takes in its value, lanes apart."""
        top, value = self.context.top, self.stores.values.argument_of_reduction(term, scope)
        label = self.context.names.fresh(f"{self.context.name_of_final(term)}_acc")
        top.body.append(self.folding.accumulator(term, label, self.folding.tile.lanes(term.args[0].axes)))
        scope.body.append(take_in(term, label, value, self.context.comment(term)))
        top.memo["acc", term] = name(label)

    def finish(self) -> None:
        """Fold the lanes; store partial sums; the last to arrive, level by level, adds them and stores the results."""
        context, plan, top = self.context, self.context.plan, self.context.top
        partials = [self.slots.partial(r) for r in plan.final if r not in plan.direct]
        row = set(plan.row) - set(plan.grid)
        everything = {r for r in plan.final if set(r.param) - row != set(plan.walk)}
        # One program has summed all that there is
        if plan.programs == 1 and not everything and not plan.direct and not self.words.pointers:
            scope = Scope(FINISH, top)
            self._store_complete(scope, {p.term: name(p.folded) for p in partials}, set(plan.final))
            top.body.extend(scope.body)
            return
        # Every program stores its own sums before it arrives anywhere
        for partial in partials:
            self.slots.store_own(partial)
        if plan.step > 1 and plan.slide is not None:
            self.rows.undo()
        body, parent = top.body, top
        buffers, walk = self.slots.addresses.buffers, self.words.walk
        # Level by level, each inside the last: only a program that was the last goes on
        for level in arrival_levels(context, buffers, walk, bool(everything), bool(self.words.pointers)):
            scope = Scope(FINISH, parent)
            totals = {p.term: self.slots.sum_slots(p, level, scope) for p in partials}
            complete = {t for t in totals if level.is_complete(t in everything)}
            partials = [p for p in partials if p.term not in complete]
            # Sums that wait for a further level go to the slot of the first program that they are made of
            for partial in partials:
                scope.body.append(self.slots.store(partial, level.first, totals[partial.term]))
            self._store_complete(scope, {t: v for t, v in totals.items() if t in complete}, complete)
            self._finish_directs(level, everything, scope)
            body.extend(level.setup)
            body.append(If(call("last_to_arrive", level.counter, level.count), scope.body))
            body, parent = scope.body, scope
            scope.closed = True
        if self.words.pointers:
            body.extend(self.words.clearing_loops())

    def _finish_directs(self, level: Level, everything: set[Term], scope: Scope) -> None:
        """Sums with a slot per item: the first level adds items, the others the sums of the level before."""
        directs = self.directs
        if not directs.sums:
            return
        coords, axes = self.nests.coords, self.context.plan.direct[directs.sums[0].term]
        before = coords.before(axes)
        with self.folding.tile.replaced_by(axes[-1], directs.lanes_side_by_side(axes[-1])):
            nest = self.nests.open(axes, scope, FINISH, 0)
            inner, (over, slot) = nest[-1].scope, directs.slots_of(level)
            totals = {d.term: directs.sum_slots(d, over, slot, inner) for d in directs.sums}
            complete = {t for t in totals if level.is_complete(t in everything)}
            directs.sums = [d for d in directs.sums if d.term not in complete]
            for direct in directs.sums:
                inner.body.append(directs.store(direct, directs.slots(level.first), totals[direct.term]))
            self._store_complete(inner, {t: v for t, v in totals.items() if t in complete}, complete)
            scope.body.append(self.nests.close(nest))
        coords.restore(axes, before)

    def _store_complete(self, scope: Scope, totals: Mapping[Term, Expr], complete: set[Term]) -> None:
        """Give the complete sums their values and store what depends on nothing else."""
        levels = self.stores.levels
        levels.clear()
        for term, value in totals.items():
            value = self.context.round_reduction(term, as_result(term, value))
            scope.memo[term] = self.context.let(scope, self.context.name_of_final(term), value)
        for sink in self.context.program.sinks:
            needed = set(terms_below(sink.terms)) & set(self.context.plan.final)
            if needed & complete and all(scope.find(t) is not None for t in needed):
                with levels.in_last_program():  # all that the output still needs is computed there
                    self.stores.store(sink, scope)
