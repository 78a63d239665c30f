"""Phase by phase along the row: passes over chunks of it, then what is complete without its lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..program.axes import Axis, Sink, Term, terms_below
from .access.coordinates import Coordinates
from .access.levels import Levels
from .access.loads import Loads
from .context import Context
from .loop_nests import LoopNests
from .reductions.final_reduction import FinalReductions
from .reductions.lane_accumulators import LaneAccumulators
from .reductions.pieces import RowPieces
from .reductions.row_ends import RowEnds
from .statements import Accumulate, Expr, Statement, call
from .stores import Stores

PACKED = {"cuda": "packed", "hip": "packed_vector"}
"""The helper that hides a 16-bit tile from the compiler; the interpreter computes everything again anyway."""


@dataclass(eq=False)
class RowPasses:
    """The body of a kernel, between its coordinates and the finish."""

    context: Context
    coords: Coordinates
    levels: Levels
    loads: Loads
    nests: LoopNests
    stores: Stores
    lanes: LaneAccumulators
    finals: FinalReductions
    pieces: RowPieces
    ends: RowEnds

    def emit(self) -> None:
        """All that this program stores itself, and what its accumulators take in."""
        plan = self.context.plan
        sinks = [s for s in self.context.program.sinks if not any(t in plan.after_final for t in terms_below(s.terms))]
        if plan.shared:
            self._emit_strip(sinks)
        elif plan.packed:
            self._emit_packed(sinks)
        else:
            self._emit_phases(sinks)

    # ------------------------------------------------------------------ phase by phase
    def _emit_phases(self, sinks: Sequence[Sink]) -> None:
        plan, body, row = self.context.plan, self.context.body, set(self.context.plan.row)
        phase_of = {id(s): _phase(s, plan.phase) for s in sinks}
        finals = {r: plan.phase[r.args[0]] for r in plan.final}
        last = max([*phase_of.values(), *finals.values(), *plan.phase.values()], default=0)
        passes = {p: self._pass_work(p, sinks, phase_of) for p in range(last + 1)} if plan.chunked else {}
        if plan.chunked:
            self._load_ahead(sinks)
        last_pass = max((p for p, work in passes.items() if work), default=0)
        for phase in range(last + 1):
            # A row that a later pass reads again stays in the cache until then
            if plan.chunked:
                self.loads.evict = "evict_first" if phase == last_pass else "evict_last"
                for axes, work in passes[phase].items():
                    self._emit_pass(axes, work)
            for reduction, own_phase in finals.items():
                if own_phase == phase and not (plan.chunked and reduction.args[0].axes & row):
                    self.finals.accumulate(reduction, body)
            for sink in sinks:
                if phase_of[id(sink)] == phase and not (plan.chunked and set(sink.axes) & row):
                    self.stores.store(sink, body)

    def _load_ahead(self, sinks: Sequence[Sink]) -> None:
        """Numbers of the row as a whole are on their way while its chunks come by."""
        plan, body = self.context.plan, self.context.body
        for term in terms_below([t for s in sinks for t in s.terms] + [r.args[0] for r in plan.final]):
            if term.op == "load" and not term.args and not term.axes & set(plan.row) and term not in plan.after_final:
                self.stores.values.value(term, body)

    def _pass_work(
        self, phase: int, sinks: Sequence[Sink], phase_of: Mapping[int, int]
    ) -> dict[frozenset[Axis], list[Term | Sink]]:
        """The work along the row in a phase, by the row axes that it walks."""
        plan, row = self.context.plan, frozenset(self.context.plan.row)
        work: dict[frozenset[Axis], list[Term | Sink]] = {}
        for term in self.context.program.terms:
            is_reduced = (term in plan.inner or term in plan.final) and term not in plan.online
            if is_reduced and plan.phase[term.args[0]] == phase and term.args[0].axes & row:
                work.setdefault(term.args[0].axes & row, []).append(term)
        for sink in sinks:
            if phase_of[id(sink)] == phase and set(sink.axes) & row:
                work.setdefault(frozenset(sink.axes) & row, []).append(sink)
        return work

    # ------------------------------------------------------------------ one pass
    def _emit_pass(self, axes: frozenset[Axis], work: Sequence[Term | Sink]) -> None:
        """One nest of loops over chunks of the row: lane accumulators before, the loops, the folds after."""
        if self.context.plan.pieces > 1:
            self.pieces.emit(work, lambda: self._emit_loops(axes, work))
        else:
            self._emit_loops(axes, work)
            self.lanes.fold(work)

    def _emit_loops(self, axes: frozenset[Axis], work: Sequence[Term | Sink]) -> None:
        """The nest, with what it accumulates."""
        plan, body = self.context.plan, self.context.body
        axes -= frozenset(plan.whole_axes)
        before = self.coords.before(axes)
        # Loops over what a sum with slots of its own keeps are the outer ones: it is complete behind the others
        direct = next((plan.direct[w] for w in work if isinstance(w, Term) and w in plan.direct), ())
        kept_axes = [a for a in direct if a in axes]
        self.levels.clear()
        outermost_first = sorted((a for a in plan.order if a in axes), key=lambda a: a not in kept_axes)
        nest = self.nests.open(outermost_first, body, body.level + 1, 1)
        chunk = nest[-1].scope if nest else body
        ends: list[Statement] = []
        self.ends.mask([w for w in work if isinstance(w, Term) and w not in plan.direct], chunk)
        # In the order of the program: what is computed for one serves the others
        for item in work:
            if isinstance(item, Sink):
                self.stores.store(item, chunk)
            elif item in plan.direct:
                outer = nest[len(kept_axes) - 1].scope if kept_axes else body
                ends += self.finals.directs.accumulate(item, outer, chunk)
            elif item in plan.final:
                self.finals.accumulate(item, chunk)
            else:
                self.lanes.accumulate(item, chunk)
        self.loads.silent = False
        if nest:
            body.body.append(self.nests.close(nest, ends, len(kept_axes)))
        if not kept_axes:
            body.body.extend(ends)
        self.coords.restore(axes, before)
        self.levels.clear()

    # ------------------------------------------------------------------ rows that strips share, rows that stay packed
    def _emit_strip(self, sinks: Sequence[Sink]) -> None:
        """Reductions along the whole row, once for all strips; then this program\'s strip of the outputs."""
        body, plan = self.context.body, self.context.plan
        self.loads.evict = "evict_last"
        inner = [t for t in self.context.program.terms if t in plan.inner]
        if inner:
            # Memory answers while the program asks whether the row was reduced by another
            ahead = self._read_strip() if plan.ahead and self.coords.has_strips() else {}
            before, body.body = body.body, []
            self._emit_pass(frozenset(plan.row), inner)
            emitted, body.body = body.body, before
            if self.coords.has_strips():
                self.finals.words.reduce_once(inner, emitted)
            else:
                body.body.extend(emitted)
            body.memo |= ahead
            self.levels.clear()
        for reduction in plan.final:
            self.finals.accumulate(reduction, body)
        for sink in sinks:
            self.stores.store(sink, body)

    def _read_strip(self) -> dict[object, Expr]:
        """The rows of this strip as they are in memory; what the body is to remember of them behind the pass."""
        body, plan = self.context.body, self.context.plan
        known = set(body.memo)
        for term in self.context.program.terms:
            if term.op == "load" and not term.args and set(plan.row) <= term.axes and set(plan.walk) & term.axes:
                self.stores.values.read_row(term, body)
        return {key: body.memo.pop(key) for key in [k for k in body.memo if k not in known]}

    def _emit_packed(self, sinks: Sequence[Sink]) -> None:
        """Phase by phase, everything along the row made anew out of what was read."""
        phase, body = self.context.plan.phase, self.context.body
        work: dict[int, list[Term | Sink]] = {}
        for term in (t for t in self.context.program.terms if t in self.context.plan.inner):
            work.setdefault(phase[term.args[0]], []).append(term)
        for sink in sinks:
            work.setdefault(_phase(sink, phase), []).append(sink)
        for position, number in enumerate(sorted(work)):
            if position:
                self._forget_row_values()
            for item in work[number]:
                if isinstance(item, Sink):
                    self.stores.store(item, body)
                else:
                    self.stores.values.value(item, body)

    def _forget_row_values(self) -> None:
        """Nothing along the row is held but the rows as they were read, and that for the compiler, too."""
        row, body, target = set(self.context.plan.row), self.context.body, self.context.target.kind
        for term in [t for t in body.memo if isinstance(t, Term) and t.axes & row]:
            del body.memo[term]
        tiles = [body.memo["tile", t] for t in self.context.program.terms if ("tile", t) in body.memo]
        for tile in tiles if target in PACKED else ():
            body.body.append(Accumulate(tile.text, "=", call(PACKED[target], tile)))


def _phase(sink: Sink, phase: Mapping[Term, int]) -> int:
    """The phase in which a sink is complete."""
    return max((phase[t] for t in sink.terms), default=0)
