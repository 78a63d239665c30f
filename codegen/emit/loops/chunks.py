"""Many steps of a linear recurrence at once: a tile of steps is scanned, on top of what the steps before it carry.

    for first_t in tl.range(0, T, BLOCK_T):
        product, total = tl.associative_scan((a, b), 0, first_order)
        after = product * h + total
        h = the last row of after

Products of many factors may leave the range of floats where what is carried does not, and stay within it where what is
carried does not: then the tile is walked by step.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...program.axes import Term
from ...schedule.loops.recurrences import Linear, added_to
from ...schedule.loops.roles import LoopProgram, LoopState
from ..access.tile_axes import TileAxes
from ..context import as_tensor
from ..emit import Emitter
from ..mathematics import TL, number, register_dtype
from ..statements import Accumulate, Expr, For, If, Let, Scope, Statement, binary, call, literal, name, sum_of
from .steps import Loop

INFINITY = literal('float("inf")')


def magnitude(values: Sequence[Expr]) -> Expr:
    """|a| + |b| + .."""
    total = sum_of([call("tl.abs", v) for v in values])
    assert total is not None
    return total


def reduced_along(tile: TileAxes, dim: int, function: str, value: Expr, state: LoopState) -> Expr:
    """A reduction along one dimension of the tile, of a state that is carried with its lanes, or as a number."""
    if not tile.lanes(state.axes):
        return call(function, value)
    return call(function, value, literal(dim), keep_dims=literal("True"))


class ChunkedLoop(Loop):
    """`linear`: what each state is multiplied with, and what is added to it."""

    def __init__(self, emitter: Emitter, program: LoopProgram, linear: dict[LoopState, Linear]) -> None:
        super().__init__(emitter, program)
        self.linear, self.time = linear, program.time
        self.dim = emitter.tile.dims.index(program.time)
        self.totals = {s for s in linear if added_to(program, s) is not None}

    def emit(self, outer: Scope | None = None) -> None:
        """for first_t in tl.range(0, T, BLOCK_T): the steps of a tile."""
        outer = outer or self.context.top
        scope = Scope(outer.level + 1, outer)
        variable, over = self._turns()
        self._set_steps(self._first_step(variable), scope)
        self._take_steps(scope)
        outer.body.append(For(variable, over, scope.body))
        del self.emitter.coords[self.time]

    def _take_steps(self, scope: Scope) -> None:
        """All states, the stores of these steps, what is carried on."""
        after = {state: self._scanned(state, scope) for state in self.linear}
        for sink in self.program.in_loop:
            self.emitter.stores.store(sink, scope)
        for state, label in after.items():
            if state in self.totals:
                scope.body.append(Accumulate(self.labels[state], "+=", label))
            else:
                scope.body.append(Accumulate(self.labels[state], "=", self._row(label, self._end(state), state)))

    def _turns(self) -> tuple[str, Expr]:
        """The variable and range of the loop over tiles."""
        steps = self.context.sizes.text(self.time.size, "T")
        return self.context.names.fresh("t_at"), call("tl.range", literal(0), steps, self.emitter.tile.block(self.time))

    def _first_step(self, variable: str) -> Expr:
        """The first step of a tile; backwards the last tile comes first."""
        block, steps = self.emitter.tile.block(self.time), self.context.sizes.text(self.time.size, "T")
        if not self.is_reversed:
            return name(variable)
        last = binary("*", binary("-", call("tl.cdiv", steps, block), literal(1)), block)
        return binary("-", last, name(variable))

    def _set_steps(self, at: Expr, scope: Scope) -> None:
        self.context.sizes.require_countable(self.time.size)
        label = self.context.names.fresh(f"first_{self.time.name}")
        self.first = scope.define(label, call("tl.cast", at, literal("tl.int64")))
        self.emitter.coords.set_lanes(self.time, self.first, scope, scope.level)
        self.emitter.levels.clear()

    # ------------------------------------------------------------------ one state
    def _scanned(self, state: LoopState, scope: Scope) -> Expr:
        """The state after each step of the tile; what is before each step is known from here on, too.

        Of what is only added up, the sum of the tile.
        """
        factor, rest = self.linear[state]
        before = name(self.labels[state])
        added = None if factor is not None and rest is None else self._tile(state, rest, 0, "added", scope)
        if added is None:
            after = self._product(state, self._tile(state, factor, 1, "factor", scope), None, before, scope)
        elif state in self.totals:
            return self._over_steps("tl.sum", added, state)
        elif factor is None:
            mask = self.emitter.coords[self.time].mask if self.is_reversed else None
            after = added if mask is None else call("tl.where", mask, added, before)
        elif factor.op == "const" and factor.param == 1:
            after = binary("+", call("tl.cumsum", added, literal(self.dim), **self._direction()), before)
        else:
            after = self._product(state, self._tile(state, factor, 1, "factor", scope), added, before, scope)
        after = after if after.text.isidentifier() else self._named(state, "after", after, scope)
        self._know(state.update.value, after, scope)
        self._know(state.before, self._named(state, "before", self._shifted(after, before), scope), scope)
        return after

    def _know(self, term: Term, value: Expr, scope: Scope) -> None:
        self.values.accumulated[term] = value
        self.emitter.levels.fix(term, scope.level)

    def _named(self, state: LoopState, word: str, value: Expr, scope: Scope) -> Expr:
        label = self.context.names.fresh(f"{self.labels[state]}_{word}")
        return scope.define(label, value)

    def _runs(self, factor: Expr, added: Expr, scope: Scope) -> tuple[Expr, Expr]:
        """The product and the total of all steps up to each, from the factor and the rest of each."""
        pair = Expr(f"({factor}, {added})", names=factor.names | added.names)
        scanned = call("tl.associative_scan", pair, literal(self.dim), name("first_order"), **self._direction())
        runs = self.context.let(scope, "runs", scanned)
        return Expr(f"{runs}[0]", names=runs.names), Expr(f"{runs}[1]", names=runs.names)

    def _direction(self) -> dict[str, Expr | str]:
        return {"reverse": literal("True")} if self.is_reversed else {}

    def _tile(self, state: LoopState, term: Term | None, neutral: int, word: str, scope: Scope) -> Expr:
        """A value at every step of the tile; steps behind the end change nothing."""
        nothing = literal(number(neutral, state.dtype))
        axes, mask = (self.time, *state.axes), self.emitter.coords[self.time].mask
        if term is None:
            value = call("tl.full", literal("[]"), nothing, literal(TL[register_dtype(state.dtype)]))
        else:
            value = as_tensor(term, self.values.value(term, scope))
        if mask is not None and term is not None:
            value = call("tl.where", mask, value, nothing)
        present = {self.time, *term.axes} if term is not None and mask is not None else term.axes if term else ()
        if self.emitter.tile.is_missing_lanes(axes, present):
            value = self.emitter.tile.broadcast(value, axes)
        return self.context.let(scope, word, value)

    def _product(self, state: LoopState, factor: Expr, added: Expr | None, before: Expr, scope: Scope) -> Expr:
        """The state after each step, by a scan; by step where that is not finite."""
        runs = (call("tl.cumprod", factor, literal(self.dim), **self._direction()),)
        product, *totals = runs if added is None else self._runs(factor, added, scope)
        after = self._named(state, "after", sum_of([binary("*", product, before), *totals]) or product, scope)
        # of a product or total that is not finite, nothing finite is made; with `total` beside it ptxas spills nothing
        is_wild = self._is_any_beyond((*totals, after), INFINITY)
        scope.body.append(If(is_wild, self._by_step(state, after, factor, added, before)))
        return after

    def _is_any_beyond(self, values: Sequence[Expr], limit: Expr) -> Expr:
        """Whether the magnitudes add up to the limit or more in any lane, or to no number."""
        beyond = call("tl.where", binary("<", magnitude(values), limit), literal(0), literal(1))
        return binary("!=", call("tl.max", beyond), literal(0))

    def _by_step(
        self, state: LoopState, after: Expr, factor: Expr, added: Expr | None, before: Expr
    ) -> list[Statement]:  # fmt: skip
        names, block = self.context.names, self.emitter.tile.block(self.time)
        here, at = names.fresh(f"{self.labels[state]}_here"), names.fresh("step")
        turn = name(at)
        if self.is_reversed:
            turn = binary("-", binary("-", block, literal(1)), turn)
        lane = self._lane()
        is_here = binary("==", lane, turn)
        step = binary("*", name(here), self._sum_where(is_here, factor, state))
        if added is not None:
            step = binary("+", step, self._sum_where(is_here, added, state))
        body: list[Statement] = [
            Accumulate(here, "=", step),
            Accumulate(after.text, "=", call("tl.where", is_here, name(here), after)),
        ]
        return [Let(here, before), For(at, call("tl.range", literal(0), block), body)]

    # ------------------------------------------------------------------ rows of a tile
    def _lane(self) -> Expr:
        lane = self.emitter.coords[self.time].lane
        assert lane is not None
        return lane

    def _sum_where(self, condition: Expr, value: Expr, state: LoopState) -> Expr:
        return self._over_steps("tl.sum", call("tl.where", condition, value, literal("0.0")), state)

    def _over_steps(self, function: str, value: Expr, state: LoopState) -> Expr:
        """A reduction of a tile of steps, in the shape that is carried: a number, where that has no lanes."""
        return reduced_along(self.emitter.tile, self.dim, function, value, state)

    def _row(self, tile: Expr, lane: Expr, state: LoopState) -> Expr:
        return self._sum_where(binary("==", self._lane(), lane), tile, state)

    def _end(self, state: LoopState) -> Expr:
        """The lane that is carried on: the last one, as lanes behind the end repeat the state, if it keeps anything."""
        factor, _ = self.linear[state]
        if self.is_reversed:
            return literal(0)
        if factor is not None or self.emitter.coords[self.time].mask is None:
            return literal(self.emitter.tile.block_sizes[self.time] - 1)
        left = binary("-", self.context.sizes.text(self.time.size, "T"), self.first)
        return binary("-", call("tl.minimum", left, self.emitter.tile.block(self.time)), literal(1))

    def _shifted(self, after: Expr, carried: Expr) -> Expr:
        """What is before each step: the row before, or what the tile before carried on."""
        lane, last = self._lane(), self.emitter.tile.block_sizes[self.time] - 1
        if self.is_reversed:
            source, edge = call("tl.minimum", binary("+", lane, literal(1)), literal(last)), last
        else:
            source, edge = call("tl.maximum", binary("-", lane, literal(1)), literal(0)), 0
        shape = f"{after}.shape"
        index = call("tl.broadcast_to", source, Expr(shape, names=after.names))
        moved = call("tl.gather", after, index, literal(self.dim))
        return call("tl.where", binary("==", lane, literal(edge)), carried, moved)
