"""Neighbours of a row that is read from a boundary on, masked in the chunks where it begins or ends, and there alone.

    x, taken = .., ..                   all that is reduced in the pass
    if the row begins or ends here:
        taken = tl.where(inside, taken, 0.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...program.axes import Term, terms_below
from ..access.coordinates import Coord, Coordinates
from ..context import Context, as_tensor
from ..mathematics import FLOATING, number
from ..statements import Accumulate, Expr, If, Scope, Statement, call, literal
from ..values import Values
from .folding import Folding
from .folds import widen_booleans


@dataclass(eq=False)
class RowEnds:
    """Reductions of a pass over chunks, made safe together: one branch, few values that live across it."""

    context: Context
    coords: Coordinates
    folding: Folding
    values: Values

    def mask(self, reductions: Sequence[Term], chunk: Scope) -> None:
        """Before a chunk is taken in: what was read of it, or what is reduced, whichever is less."""
        slide = self.context.plan.slide
        coord = self.coords.get(slide.axis) if slide is not None else None
        if slide is None or coord is None or coord.groups is None or coord.groups.edge is None or coord.groups.summed:
            return
        masked = [r for r in reductions if self.folding.unsafe_axes(r) == [slide.axis] and r.args[0].op != "const"]
        loads = self._neighbours(masked)
        self.folding.loads.silent = True
        left = [r for r in masked if self.folding.unsafe_axes(r)]
        if len(loads) < len(masked) - len(left):
            self._mask_loads(loads, coord, chunk)
        else:
            self.folding.loads.silent, left = False, masked
        self._mask_arguments(left, coord, chunk)

    def _neighbours(self, reductions: Sequence[Term]) -> list[Term]:
        """The loads below the reductions that bring neighbours in."""
        loads = (t for t in terms_below([r.args[0] for r in reductions]) if t.op == "load" and t.dtype in FLOATING)
        return [t for t in loads if self.coords.groups_of(t.param.place, not t.args) is not None]

    def _mask_loads(self, loads: Sequence[Term], coord: Coord, chunk: Scope) -> None:
        found = [(self.values.value(load, chunk), self.folding.loads.pad(load), load.dtype) for load in loads]
        silenced = [self._silenced(label, literal(number(pad, dtype)), coord) for label, pad, dtype in found]
        self._at_ends(silenced, coord, chunk)

    def _mask_arguments(self, reductions: Sequence[Term], coord: Coord, chunk: Scope) -> None:
        """Each argument once for each number that has no effect."""
        wanted = {(r.args[0], self.folding.nothing(r)): r for r in reductions}
        for arg, nothing in wanted:
            value = as_tensor(arg, widen_booleans(arg, self.values.value(arg, chunk)))
            label = self.context.names.fresh("taken", level=chunk.level)
            chunk.memo["neutral", arg, nothing] = chunk.define(label, value)
        taken = [self._silenced(chunk.memo["neutral", arg, n], n, coord) for arg, n in wanted]
        self._at_ends(taken, coord, chunk)

    def _silenced(self, label: Expr, nothing: Expr, coord: Coord) -> Accumulate:
        assert coord.mask is not None
        return Accumulate(label.text, "=", call("tl.where", coord.mask, label, nothing))

    def _at_ends(self, statements: Sequence[Statement], coord: Coord, chunk: Scope) -> None:
        if statements and coord.groups is not None and coord.groups.edge is not None:
            chunk.body.append(If(coord.groups.edge, list(statements)))
