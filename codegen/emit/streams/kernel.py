"""A streamed kernel to text: where a program is; a pass over the stream for each turn of accumulation; then the stores.

    for col_at in tl.range(start, stop, BLOCK_N):      blocks in which something is alive, masked where not all is
        s = tl.dot(q, tl.trans(k))
        highest = larger(top, row_max(s))
        acc = tl.dot(exp(s - highest), v, acc * exp(top - highest))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ...kernel import Kernel, Target
from ...program.axes import Axis, Program, Sink, Term, terms_below
from ...program.sizes import Hints, cdiv, evaluate_size, tidy
from ...program.terms import TermTable
from ...schedule.schedule import Schedule
from ...schedule.streams.accumulators import Accumulation, Accumulator
from ...schedule.streams.algebra import Algebra
from ...schedule.streams.masks import span_of
from ...schedule.streams.roles import Roles
from ...schedule.streams.tiles import StreamTile, schedule_of, streamed_program, tile_of
from ..access.coordinates import Coord
from ..access.traffic import Traffic, add_bytes
from ..context import name_of
from ..emit import Emitter, assemble
from ..mathematics import rules_for
from ..names import Names
from ..statements import For, Scope, call, literal, name
from .passes import StreamPass
from .products import TileProducts
from .shapes import Shapes
from ....ir.types import ITEMSIZE, LOW_FLOATS, product


class StreamKernel:
    """The parts of one streamed kernel under construction."""

    def __init__(self, emitter: Emitter, table: TermTable, roles: Roles, sums: Accumulation) -> None:
        self.emitter, self.context, self.roles, self.sums = emitter, emitter.context, roles, sums
        self.algebra = Algebra(table, roles.is_fixed)
        self.shapes = Shapes(self.context, emitter.tile, emitter.coords, roles)
        self.products = TileProducts(self.context, self.shapes, emitter.values, roles)

    def emit(self) -> None:
        self._set_coordinates()
        for turn in range(self.sums.passes):
            accumulators = self.sums.of_pass(turn)
            span = span_of(accumulators, self.roles, self.context.hints)
            self.context.sizes.guards.update(dict.fromkeys(span.guards))
            StreamPass(self, accumulators, span).emit()
        for sink in self.context.program.sinks:
            self._store(sink)

    def _set_coordinates(self) -> None:
        """The program's number as a block of rows, and the coordinates of the grid."""
        context, coords = self.context, self.emitter.coords
        grid = context.plan.grid
        if any(set(grid) - set(s.axes) for s in context.program.sinks):
            self.emitter.walk.require_nonzero(a.size for a in grid)
        axes = [a for a in grid if not coords.is_one_block(a)]
        if axes:
            self.emitter.nests.set_from_flat(axes, context.number_program(), context.top, 0)
        self.shapes.set_depths()
        if self.roles.keeps_stream:
            self.shapes.set_kept_stream()

    def reduce_row(self, term: Term) -> None:
        """A reduction along a depth, once for the rows of the program."""
        top, values = self.context.top, self.emitter.values
        with self.shapes.of(self.roles.row, term.param[0]):
            value = values.folding.fold(term, values.value(term.args[0], top))
        values.accumulated[term] = self.context.let(top, name_of(term) or "total", value)
        self.emitter.levels.fix(term, 0)

    def _store(self, sink: Sink) -> None:
        """What is made of complete sums; products that no loop needed are made now."""
        top, roles = self.context.top, self.roles
        columns = [a for a in roles.depth if a in sink.axes]
        with self.shapes.of(roles.row, columns[0] if columns else roles.stream):
            self.emitter.stores.store(sink, top)


def name_axes(roles: Roles, _plan: Schedule, names: Names) -> Mapping[Axis, str]:
    """Row and col over M and N, depths over D, E ..; the others are scalars."""
    spare = iter("DEFGHIJKLOPQRSTUVWXYZABC")
    words = {roles.row: ("row", "M"), roles.stream: ("col", "N")}
    letters: dict[Axis, str] = {}
    for axis in (roles.row, roles.stream, *roles.depth, *roles.outer, *roles.grid):
        word, letter = words.get(axis) or ("", next(spare))
        letters[axis], axis.name = letter, word or letter.lower()
        names.fresh(letter), names.fresh(axis.name)
    return letters


def traffic_of_stream(emitter: Emitter, roles: Roles, tile: StreamTile) -> Traffic:
    """Each place once from memory; what the stream reads is read by every block of rows, from L2 but for the first."""
    traffic = emitter.traffic()
    again = tidy(cdiv(roles.row.size, tile.blocks[roles.row]) - 1)
    for load in (t for t in emitter.context.program.terms if t.op == "load" and roles.stream in t.axes):
        if roles.row not in load.axes and again != 0:
            once = tidy(product(a.size for a in load.axes) * ITEMSIZE[load.dtype])
            add_bytes(traffic.cached, emitter.buffers.labels[load.param.ref], tidy(once * again))
    return traffic


def kernel_of_stream(
    table: TermTable, sums: Accumulation, roles: Roles, target: Target, hints: Hints, label: str
) -> Kernel:
    """One kernel for sinks that share rows and a stream."""
    tile = tile_of(roles, sums, target, hints)
    program = streamed_program(sums)
    emitter = Emitter(program, schedule_of(roles, tile), target, hints, label, partial(name_axes, roles), tile.blocks)
    is_low = any(t.op == "load" and t.dtype in LOW_FLOATS for t in program.terms)
    emitter.values.rules = rules_for(target.kind, target.fast, is_low)
    StreamKernel(emitter, table, roles, sums).emit()
    return assemble(emitter, traffic_of_stream(emitter, roles, tile))
