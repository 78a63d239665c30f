"""A loop over time and one behind it over the same lanes, to text: in one kernel, a barrier between them.

    for block in tl.range(0, tl.cdiv(T, 16)):
        tl.store(h_kept_ptr + block * .., h)
        for t_at in tl.range(0, tl.minimum(16, T - first)):
            ..
    tl.debug_barrier()
    for block_at in tl.range(0, tl.cdiv(T, 16)):
        block = tl.cdiv(T, 16) - 1 - block_at
        h = tl.load(h_kept_ptr + block * ..)
        for t_at in tl.range(0, tl.minimum(16, T - first)):
            tl.store(z_ptr + t_at * .., g(h))
            h = ..
        tl.debug_barrier()
        for step in tl.range(0, tl.minimum(16, T - first)):
            .. tl.load(z_ptr + (tl.minimum(16, T - first) - 1 - step) * ..) ..
        tl.debug_barrier()
"""

from __future__ import annotations

from collections.abc import Callable

from ...schedule.loops.round_trips import Blocks, RoundTrip
from ..access.coordinates import Coord
from ..emit import Emitter
from ..statements import Barrier, Expr, For, Scope, add, binary, call, literal, name
from .steps import Loop

Step = Callable[[Scope, Expr, Expr], None]
"""What is done in a block: (its scope, its first step, how many it has)"""


class RoundTripLoops:
    """Both loops under construction."""

    def __init__(self, emitter: Emitter, trip: RoundTrip) -> None:
        self.emitter, self.trip, self.context = emitter, trip, emitter.context
        self.first, self.second = Loop(emitter, trip.first), Loop(emitter, trip.second)

    def emit(self) -> None:
        """All of the kernel."""
        blocks = self.trip.blocks
        Loop(self.emitter, self.trip).set_coordinates()
        self.first.begin()
        self.first.emit() if blocks is None else self._there(blocks)
        self.first.finish()
        self.context.top.body.append(Barrier())
        self.second.begin()
        self.second.emit() if blocks is None else self._back(blocks)
        self.second.finish()

    def _there(self, blocks: Blocks) -> None:
        """The first loop, which keeps what it carries into each block."""

        def step(scope: Scope, first: Expr, count: Expr) -> None:
            self.first.keep(blocks.kept, scope)
            self.first.emit_block(scope, first, count, blocks.slot)

        self._blocks(blocks, self.first, step)

    def _back(self, blocks: Blocks) -> None:
        """The other one: of each block what is handed over is made again, and then it is read."""
        again = Loop(self.emitter, blocks.again)

        def step(scope: Scope, first: Expr, count: Expr) -> None:
            self.emitter.levels.clear()
            again.begin(scope)
            again.emit_block(scope, first, add(count, literal(blocks.further)), blocks.slot)
            scope.body.append(Barrier())
            self.second.emit_block(scope, first, count, blocks.slot)
            scope.body.append(Barrier())

        self._blocks(blocks, self.second, step)

    def _blocks(self, blocks: Blocks, loop: Loop, step: Step) -> None:
        """for block in tl.range(0, tl.cdiv(T, STEPS)): from the first to the last, or the other way."""
        context, scope, length = self.context, Scope(1, self.context.top), literal(blocks.steps)
        context.sizes.require_countable(loop.program.time.size)
        steps = context.sizes.text(loop.program.time.size, "T")
        count, variable = call("tl.cdiv", steps, length), context.names.fresh("block_at")
        number = binary("-", binary("-", count, literal(1)), name(variable)) if loop.is_reversed else name(variable)
        block = scope.define(context.names.fresh("block"), call("tl.cast", number, literal("tl.int64")))
        self.emitter.coords[blocks.axis] = Coord(block, None, None, scope.level)
        first = scope.define(context.names.fresh("first_t"), binary("*", block, length))
        left = call("tl.minimum", length, binary("-", steps, first))
        step(scope, first, scope.define(context.names.fresh("steps"), left))
        context.top.body.append(For(variable, call("tl.range", literal(0), count), scope.body))
        del self.emitter.coords[blocks.axis]
