"""Sums over pairs inside a streamed kernel: a tile [row, stream] that takes in one place of what is summed at a time.

    d = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, D):
        d += f(x[rows, k][:, None], y[cols, k][None, :])
"""

from __future__ import annotations

from dataclasses import dataclass

from ...program.axes import Axis, Term
from ...schedule.streams.places import UNROLLED
from ...schedule.streams.roles import Roles
from ..access.coordinates import Coord
from ..context import name_of
from ..emit import Emitter
from ..reductions.folds import take_in
from ..statements import Expr, For, Scope, call, literal, name
from .shapes import Shapes
from .values import StreamValues

INNERMOST = 3
"""The level of the loops along such places: below those along the stream."""


@dataclass(eq=False)
class PairSums:
    """The tiles that are no products of matrices."""

    emitter: Emitter
    values: StreamValues
    shapes: Shapes
    roles: Roles

    def emit(self, term: Term, scope: Scope) -> None:
        """Such a tile, under a name; its value is known from here on."""
        context, tile = self.emitter.context, (self.roles.row, self.roles.stream)
        label = context.names.fresh(name_of(term) or "pairs")
        with self.shapes.of(*tile):
            scope.body.append(self.emitter.folding.accumulator(term, label, tile))
        innermost, loops = self._open(term.param, scope)
        value = self.values.value(term.args[0], innermost)
        with self.shapes.of(*tile):
            value = self.shapes.spread(value, self.shapes.dims(term.args[0]))
        innermost.body.append(take_in(term, label, value, context.comment(term)))
        for variable, over, inner in reversed(loops):
            assert inner.parent is not None
            inner.parent.body.append(For(variable, over, inner.body))
        self._close(term.param)
        self.values.accumulated[term] = name(label)

    def _open(self, places: tuple[Axis, ...], scope: Scope) -> tuple[Scope, list[tuple[str, Expr, Scope]]]:
        """Loops along the places, one inside the other."""
        loops: list[tuple[str, Expr, Scope]] = []
        for axis in places:
            scope = Scope(INNERMOST, scope)
            variable = self.emitter.context.names.fresh(f"{axis.name}_at")
            wide = call("tl.cast", name(variable), literal("tl.int64"))
            place = scope.define(self.emitter.context.names.fresh(axis.name), wide)
            self.emitter.coords[axis] = Coord(place, None, None, INNERMOST)
            loops.append((variable, self._range(axis), scope))
        self.emitter.levels.clear()
        return scope, loops

    def _close(self, places: tuple[Axis, ...]) -> None:
        """Outside of its loops such a sum varies along rows and columns alone."""
        for axis in places:
            self.emitter.coords[axis] = Coord(None, None, None, 0)
        self.emitter.levels.clear()

    def _range(self, axis: Axis) -> Expr:
        if isinstance(axis.size, int) and axis.size <= UNROLLED:
            return call("tl.static_range", literal(0), literal(axis.size))
        return call("tl.range", literal(0), self.emitter.context.sizes.text(axis.size))
