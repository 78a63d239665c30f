"""The kernels of time in chunks: what each chunk makes of a state, these one after the other, and the steps of each.

    for item in tl.range(chunk * ITEMS, tl.minimum((chunk + 1) * ITEMS, tl.cdiv(T, BLOCK_T))):
        first_t = item * BLOCK_T
        ..
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from ...program.axes import Axis, Term
from ...program.sizes import cdiv
from ...schedule.loops.phases import LARGEST
from ...schedule.loops.recurrences import Linear
from ...schedule.loops.roles import LoopProgram, LoopState
from ..access.coordinates import Coord
from ..context import Context, as_tensor
from ..emit import Emitter
from ..mathematics import TL
from ..statements import Accumulate, Expr, For, If, Let, Scope, Statement, binary, call, literal, name
from .chunks import ChunkedLoop, magnitude

NO_NUMBER = literal('float("nan")')


@dataclass(frozen=True)
class Chunks:
    """The tiles of steps of each chunk: `block` steps of `time` in each."""

    context: Context
    time: Axis
    count: int
    block: int

    def tiles_of(self, chunk: Expr, scope: Scope) -> tuple[Expr, Expr]:
        """The first tile of a chunk, and the one behind it."""
        sizes, names = self.context.sizes, self.context.names
        tiles = cdiv(self.time.size, self.block)
        share = -(-tiles // self.count) if isinstance(tiles, int) else sympy.ceiling(tiles / self.count)
        sizes.require_countable(self.time.size)
        items = sizes.fixed("ITEMS", share)
        first = scope.define(names.fresh("first"), binary("*", chunk, items))
        following = binary("*", binary("+", chunk, literal(1)), items)
        of_time = call("tl.cdiv", sizes.text(self.time.size, "T"), literal(self.block))
        return first, scope.define(names.fresh("stop"), call("tl.minimum", following, of_time))

    def first_step(self, item: Expr, first: Expr, stop: Expr) -> Expr:
        """The first step of a tile; backwards the last tile comes first."""
        if self.time.turn == "backward":
            # never below the first, which is said for whoever proves it
            mirrored = binary("-", binary("+", first, binary("-", stop, literal(1))), item)
            item = call("tl.maximum", first, mirrored)
        return binary("*", item, literal(self.block))


class PartOfTime(ChunkedLoop):
    """The steps of one chunk of time."""

    def __init__(
        self, emitter: Emitter, program: LoopProgram, linear: dict[LoopState, Linear], chunk: Axis
    ) -> None:  # fmt: skip
        super().__init__(emitter, program, linear)
        block = emitter.tile.block_sizes[self.time]
        self.chunk, self.chunks = chunk, Chunks(self.context, self.time, int(chunk.size), block)
        self.ends_at: tuple[Expr, Expr] | None = None

    def _turns(self) -> tuple[str, Expr]:
        chunk = self.emitter.coords[self.chunk].base
        assert chunk is not None
        narrow = call("tl.cast", chunk, literal("tl.int32"))
        self.ends_at = self.chunks.tiles_of(narrow, self.context.top)
        return "item", call("tl.range", *self.ends_at)

    def _first_step(self, variable: str) -> Expr:
        assert self.ends_at is not None
        return self.chunks.first_step(name(variable), *self.ends_at)


class ChunkEnds(PartOfTime):
    """What each chunk makes of a state: no number where what is between might leave the range of floats."""

    def __init__(
        self, emitter: Emitter, program: LoopProgram, ends: tuple[tuple[LoopState, LoopState, Linear], ...], chunk: Axis
    ) -> None:
        super().__init__(emitter, program, {}, chunk)
        self.ends = ends
        self.beyond: dict[LoopState, str] = {}

    def begin(self, scope: Scope | None = None) -> None:
        super().begin(scope)
        top = self.context.top
        for product, _, _ in self.ends:
            self.beyond[product] = self.context.names.fresh("beyond")
            zeros = call("tl.zeros_like", name(self.labels[product]))
            top.define(self.beyond[product], binary("!=", zeros, literal("0.0")))

    def emit(self) -> None:
        """for item in tl.range(..): the products of factors, and the ends of what begins with zero."""
        scope = Scope(1, self.context.top)
        variable, over = self._turns()
        self._set_steps(self._first_step(variable), scope)
        for product, end, linear in self.ends:
            self._take_in(product, end, linear, scope)
        self.context.top.body.append(For(variable, over, scope.body))
        del self.emitter.coords[self.time]

    def _take_in(self, product: LoopState, end: LoopState, linear: Linear, scope: Scope) -> None:
        """One tile of steps: what is scanned, on top of what the tiles before it made."""
        factor = self._tile(product, linear.factor, 1, "factor", scope)
        if linear.factor is None:  # the state is made anew in every step
            factor = self.context.let(scope, "factor", binary("*", factor, self._of_steps(scope)))
        added = self._tile(product, linear.rest, 0, "added", scope)
        scaled, total = self._runs(factor, added, scope)
        through = self._named(product, "after", binary("*", scaled, name(self.labels[product])), scope)
        after = self._named(end, "after", binary("+", binary("*", scaled, name(self.labels[end])), total), scope)
        limit = literal(repr(LARGEST[product.dtype]))
        is_beyond = binary("<", magnitude((through, after)), limit)
        self._note(product, is_beyond, scope)
        for state, value in ((product, through), (end, after)):
            row = self._row(value, literal(0 if self.is_reversed else self.emitter.tile.block_sizes[self.time] - 1))
            scope.body.append(Accumulate(self.labels[state], "=", row))

    def _of_steps(self, scope: Scope) -> Expr:
        """Zero at steps, one behind their end."""
        mask = self.emitter.coords[self.time].mask
        return literal("0.0") if mask is None else call("tl.where", mask, literal("0.0"), literal("1.0"))

    def _note(self, product: LoopState, is_within: Expr, scope: Scope) -> None:
        several = len(self.emitter.tile.dims) > 1
        keep_dims = {"keep_dims": literal("True")} if several else {}
        beyond = call("tl.where", is_within, literal(0), literal(1))
        found = binary("!=", call("tl.max", beyond, literal(self.dim), **keep_dims), literal(0))
        label = self.beyond[product]
        scope.body.append(Accumulate(label, "=", binary("|", name(label), found)))

    def finish(self) -> None:
        for product, _, _ in self.ends:
            label = self.labels[product]
            value = call("tl.where", name(self.beyond[product]), NO_NUMBER, name(label))
            self.context.top.body.append(Accumulate(label, "=", value))
        super().finish()


class JoinedChunks(ChunkedLoop):
    """The state before each chunk, from all chunks at once; step by step where one of them is no number.

    `steps`: the recurrence of the steps of `time`, of which a tile has so many.
    """

    def __init__(
        self, emitter: Emitter, program: LoopProgram, joins: dict[LoopState, Linear], steps: dict[LoopState, Linear],
        time: Axis, block: int,
    ) -> None:  # fmt: skip
        super().__init__(emitter, program, joins)
        self.steps, self.walked = steps, time
        self.chunks = Chunks(self.context, time, int(self.time.size), block)
        self.is_reversed = time.turn == "backward"

    def _scanned(self, state: LoopState, scope: Scope) -> Expr:
        factor, rest = self.linear[state]
        assert factor is not None and rest is not None
        before = name(self.labels[state])
        factor_tile, added = self._tile(state, factor, 1, "factor", scope), self._tile(state, rest, 0, "added", scope)
        product, total = self._runs(factor_tile, added, scope)
        after = self._named(state, "after", binary("+", binary("*", product, before), total), scope)
        starts = self._named(state, "before", self._shifted(after, before), scope)
        limit = literal(repr(LARGEST[state.dtype]))
        is_wild = self._is_any_beyond((factor_tile, added, starts, after), limit)
        scope.body.append(If(is_wild, self._walked(state, starts, after, scope)))
        self._know(state.update.value, after, scope)
        self._know(state.before, starts, scope)
        return after

    def _walked(self, state: LoopState, starts: Expr, after: Expr, outer: Scope) -> list[Statement]:
        """for chunk in tl.range(0, CHUNKS): what is carried into it, then its steps, then what it carries on."""
        names, lane, count = self.context.names, self._lane(), literal(self.chunks.count)
        here, at = names.fresh(f"{self.labels[state]}_here"), names.fresh("chunk_at")
        chunk = binary("-", binary("-", count, literal(1)), name(at)) if self.is_reversed else name(at)
        is_here = binary("==", lane, chunk)
        scope = Scope(outer.level + 1, outer)
        scope.body.append(Accumulate(starts.text, "=", call("tl.where", is_here, name(here), starts)))
        scope.body.append(self._tiles_of(state, here, chunk, scope))
        scope.body.append(Accumulate(after.text, "=", call("tl.where", is_here, name(here), after)))
        return [Let(here, name(self.labels[state])), For(at, call("tl.range", literal(0), count), scope.body)]

    def _tiles_of(self, state: LoopState, here: str, chunk: Expr, outer: Scope) -> For:
        """The tiles of one chunk, and the steps of each, of which the last tile has fewer."""
        names, scope = self.context.names, Scope(outer.level + 1, outer)
        ends, item = self.chunks.tiles_of(chunk, outer), names.fresh("item")
        at = self.chunks.first_step(name(item), *ends)
        first = scope.define(names.fresh("first_t"), call("tl.cast", at, literal("tl.int64")))
        behind = binary("-", self.context.sizes.text(self.walked.size, "T"), first)
        count = scope.define(names.fresh("steps"), call("tl.minimum", literal(self.chunks.block), behind))
        scope.body.append(self._steps_of(state, here, first, count, scope))
        return For(item, call("tl.range", *ends), scope.body)

    def _steps_of(self, state: LoopState, here: str, first: Expr, count: Expr, outer: Scope) -> For:
        """The steps of one tile, one after the other: here = factor * here + rest."""
        names, scope = self.context.names, Scope(outer.level + 1, outer)
        variable = names.fresh("step")
        turn = binary("-", binary("-", count, literal(1)), name(variable)) if self.is_reversed else name(variable)
        step = scope.define(names.fresh("t"), binary("+", first, turn))
        self.emitter.coords[self.walked] = Coord(step, None, None, scope.level)
        self.emitter.levels.clear()
        factor, rest = self.steps[state]
        value = name(here)
        value = literal("0.0") if factor is None else binary("*", self._of_step(state, factor, scope), value)
        value = value if rest is None else binary("+", value, self._of_step(state, rest, scope))
        scope.body.append(Accumulate(here, "=", self.emitter.tile.broadcast(value, state.axes)))
        del self.emitter.coords[self.walked]
        self.emitter.levels.clear()
        return For(variable, call("tl.range", literal(0), count), scope.body)

    def _of_step(self, state: LoopState, term: Term, scope: Scope) -> Expr:
        value = as_tensor(term, self.values.value(term, scope))
        return call("tl.cast", value, literal(TL[state.dtype])) if term.dtype != state.dtype else value
