"""A streamed kernel under construction: its emitter, the roles of its axes, its shapes and products."""

from __future__ import annotations

from collections.abc import Iterable

from ...program.axes import REDUCTIONS, Sink, Term, terms_below
from ...program.terms import TermTable
from ...schedule.separation.algebra import Algebra
from ...schedule.streams.accumulators import Accumulation
from ...schedule.streams.roles import Roles
from ..context import name_of
from ..emit import Emitter
from ..reductions.folds import as_result, fold_function
from ..statements import Scope, call, literal
from .pairs import PairSums
from .products import TileProducts
from .shapes import Shapes
from .values import StreamValues


class Stream:
    """What the passes and bounds of one kernel ask. `labels`: the names of all accumulators so far."""

    def __init__(self, emitter: Emitter, table: TermTable, roles: Roles, sums: Accumulation) -> None:
        self.emitter, self.context, self.roles, self.sums = emitter, emitter.context, roles, sums
        self.labels: dict[Term, str] = {}
        self.summed = {a.term for a in sums.accumulators}
        self.algebra = Algebra(table, roles.is_fixed)
        self.shapes = Shapes(self.context, emitter.tile, emitter.coords, roles)
        self.values = StreamValues(emitter, self.shapes)
        emitter.stores.values = self.values
        self.products = TileProducts(self.context, self.values, roles)
        self.pairs = PairSums(emitter, self.values, self.shapes, roles)

    def set_coordinates(self, longest_last: bool) -> None:
        """The program's number as a block of rows, and the coordinates of the grid.

        longest_last: the last rows walk most of the stream. They begin first: at the end no long one is waited for.
        """
        context, coords = self.context, self.emitter.coords
        grid = context.plan.grid
        if any(set(grid) - set(s.axes) for s in context.program.sinks):
            self.emitter.walk.require_nonzero(a.size for a in grid)
        axes = [a for a in grid if not coords.is_one_block(a)]
        if axes:
            backwards = self.roles.row if longest_last else None
            self.emitter.nests.set_from_flat(axes, context.number_program(), context.top, 0, backwards)
        self.shapes.take_over()

    def reduce_depth(self, term: Term, scope: Scope) -> None:
        """A reduction along a depth, under a name."""
        dims, arg = self.shapes.dims(term), term.args[0]
        with self.shapes.of(*self.shapes.dims(arg)):
            value = self.values.argument_of_reduction(term, scope)
        with self.shapes.of(*dims, term.param[0]):
            value = self.shapes.spread(value, self.shapes.dims(arg))
        folded = as_result(term, call(fold_function(term), value, literal(len(dims))))
        self.values.accumulated[term] = self.context.let(scope, name_of(term) or "total", folded)

    def reduce_depths(self, roots: Iterable[Term]) -> None:
        """Reductions of rows that no pass needed."""
        sums = self.values.accumulated
        for term in (t for t in terms_below(roots, sums) if t.op in REDUCTIONS and t not in sums):
            self.reduce_depth(term, self.context.top)
            self.emitter.levels.fix(term, 0)

    def is_of_rows(self, sink: Sink) -> bool:
        """Made of rows alone: no sum of a pass is below it."""
        return not self.summed & set(terms_below(sink.terms))

    def store(self, sink: Sink) -> None:
        """What is made of complete sums."""
        order = (self.roles.row, self.roles.stream, *self.roles.depth)
        with self.shapes.of(*(a for a in order if a in sink.axes)):
            self.emitter.stores.store(sink, self.context.top)
