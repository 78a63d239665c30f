"""Parts of time: the tiles of steps of a chunk, and what a chunk makes of the state before it.

    for item in tl.range(chunk * ITEMS, tl.minimum((chunk + 1) * ITEMS, tl.cdiv(T, BLOCK_T))):
        first_t = item * BLOCK_T
        ..
"""

from __future__ import annotations

import sympy

from ...program.sizes import cdiv
from ...schedule.loops.look_back import LARGEST, Found, LookBack
from ...schedule.loops.recurrences import Linear
from ...schedule.loops.roles import LoopProgram, LoopState
from ..context import Context
from ..emit import Emitter
from ..statements import Accumulate, Expr, Scope, binary, call, literal, name
from .chunks import ChunkedLoop, magnitude

NO_NUMBER = literal('float("nan")')


class Turns:
    """The tiles of steps in the order of time: those of this program's chunk, and all before them."""

    def __init__(self, context: Context, look: LookBack, chunk: Expr, block: int) -> None:
        self.time, self.block, top = look.time, block, context.top
        tiles = cdiv(self.time.size, block)
        count = int(look.axis.size)
        share = -(-tiles // count) if isinstance(tiles, int) else sympy.ceiling(tiles / count)
        context.sizes.require_countable(self.time.size)
        items = context.sizes.fixed("ITEMS", share)
        steps = context.sizes.text(self.time.size, "T")
        self.tiles = top.define(context.names.fresh("tiles"), call("tl.cdiv", steps, literal(block)))
        self.first = top.define(context.names.fresh("first"), binary("*", chunk, items))
        following = call("tl.minimum", binary("+", self.first, items), self.tiles)
        self.stop = top.define(context.names.fresh("stop"), following)

    def first_step(self, item: Expr) -> Expr:
        """The first step of a tile; backwards the last tile comes first."""
        if self.time.turn == "backward":
            item = binary("-", binary("-", self.tiles, literal(1)), item)
        return binary("*", item, literal(self.block))


class PartOfTime(ChunkedLoop):
    """The steps of some tiles of time, from `first` to before `stop`."""

    def __init__(
        self, emitter: Emitter, program: LoopProgram, linear: dict[LoopState, Linear], turns: Turns, first: Expr,
        stop: Expr,
    ) -> None:  # fmt: skip
        super().__init__(emitter, program, linear)
        self.turns, self.over = turns, call("tl.range", first, stop)

    def _turns(self) -> tuple[str, Expr]:
        return self.context.names.fresh("item"), self.over

    def _first_step(self, variable: str) -> Expr:
        return self.turns.first_step(name(variable))


class ChunkEnds(PartOfTime):
    """What a chunk makes of the states before it: no number where what is between might leave the range of floats."""

    def __init__(self, emitter: Emitter, look: LookBack, turns: Turns) -> None:
        states = [s for f in look.found for s in (f.product, f.end)]
        program = LoopProgram([], states, look.time, part=look.part)
        super().__init__(emitter, program, {}, turns, turns.first, turns.stop)
        self.found = look.found
        self.words = {s: w for f in look.found for s, w in ((f.product, "factor"), (f.end, "end"))}
        self.beyond: dict[LoopState, str] = {}

    def _wish(self, state: LoopState) -> str:
        return f"{super()._wish(state)}_{self.words[state]}"

    def begin(self, scope: Scope | None = None) -> None:
        super().begin(scope)
        top = self.context.top
        for found in self.found:
            self.beyond[found.product] = self.context.names.fresh("beyond")
            zeros = call("tl.zeros_like", name(self.labels[found.product]))
            top.define(self.beyond[found.product], binary("!=", zeros, literal("0.0")))

    def _take_steps(self, scope: Scope) -> None:
        for found in self.found:
            self._take_in(found, scope)

    def _take_in(self, found: Found, scope: Scope) -> None:
        """One tile of steps: what is scanned, on top of what the tiles before it made."""
        product, end = found.product, found.end
        factor = self._tile(product, found.linear.factor, 1, "factor", scope)
        if found.linear.factor is None:  # the state is made anew in every step
            factor = self.context.let(scope, "factor", binary("*", factor, self._of_steps(scope)))
        added = self._tile(product, found.linear.rest, 0, "added", scope)
        scaled, sums = self._runs(factor, added, scope)
        through = self._named(product, "after", binary("*", scaled, name(self.labels[product])), scope)
        after = self._named(end, "after", binary("+", binary("*", scaled, name(self.labels[end])), sums), scope)
        self._note(product, binary("<", magnitude((through, after)), largest(product)), scope)
        for state, value in ((product, through), (end, after)):
            lane = literal(0 if self.is_reversed else self.emitter.tile.block_sizes[self.time] - 1)
            row = self._row(value, lane, state)
            scope.body.append(Accumulate(self.labels[state], "=", row))

    def _of_steps(self, scope: Scope) -> Expr:
        """Zero at steps, one behind their end."""
        mask = self.emitter.coords[self.time].mask
        return literal("0.0") if mask is None else call("tl.where", mask, literal("0.0"), literal("1.0"))

    def _note(self, product: LoopState, is_within: Expr, scope: Scope) -> None:
        beyond = call("tl.where", is_within, literal(0), literal(1))
        found = binary("!=", self._over_steps("tl.max", beyond, product), literal(0))
        label = self.beyond[product]
        scope.body.append(Accumulate(label, "=", binary("|", name(label), found)))

    def finish(self) -> None:
        for found in self.found:
            label = self.labels[found.product]
            value = call("tl.where", name(self.beyond[found.product]), NO_NUMBER, name(label))
            self.context.top.body.append(Accumulate(label, "=", value))


def largest(state: LoopState) -> Expr:
    return literal(repr(LARGEST[state.dtype]))
