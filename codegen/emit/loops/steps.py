"""A loop over time, step by step: what is carried is set before the loop, read and set again in every turn of it.

    h = tl.load(h0_ptr + ..)
    for t in tl.range(0, T):
        h_next = tl.load(a_ptr + t * ..) * h + tl.load(x_ptr + t * ..)
        tl.store(out_ptr + t * .., h_next)
        h = h_next
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ....ir.errors import Unfusible
from ....ir.types import LOW_FLOATS
from ...program.axes import Axis, Sink, Term
from ...schedule.loops.roles import LoopProgram, LoopState, Part
from ...schedule.separation.algebra import source_of
from ..access.coordinates import Coord
from ..context import as_tensor, name_of
from ..emit import Emitter
from ..mathematics import narrow, number
from ..statements import Accumulate, Expr, For, Scope, binary, call, literal, name


def multiplied_in(left: Term, right: Term, product: Term) -> str:
    """The dtype of the operands of a product: what was only widened is multiplied as it was."""
    sources = {source_of(t).dtype for t in (left, right)}
    found = sources.pop() if len(sources) == 1 else product.dtype
    if found not in ("f16", "bf16", "f32"):
        assert product.node is not None
        raise Unfusible(product.node, f"no tile of {found} is multiplied")
    return found


def operand(term: Term, dtype: str, value: Expr) -> Expr:
    """A tile as it is multiplied."""
    value = as_tensor(term, value)
    return narrow(value, dtype) if dtype in LOW_FLOATS else value


class Loop:
    """A loop under construction. `labels`: the names of what is carried."""

    def __init__(self, emitter: Emitter, program: LoopProgram) -> None:
        self.emitter, self.program, self.context = emitter, program, emitter.context
        self.values = emitter.values
        self.labels: dict[LoopState, str] = {}
        self.is_reversed = program.time.turn == "backward"

    def set_coordinates(self) -> None:
        """Axes that the program covers whole, and its place in the grid."""
        context, coords, plan = self.context, self.emitter.coords, self.context.plan
        for axis in plan.row:
            coords.set_whole(axis)
        if any(set(plan.grid) - set(s.axes) for s in self.program.sinks):
            self.emitter.walk.require_nonzero(a.size for a in plan.grid)
        axes = [a for a in plan.grid if not coords.is_one_block(a)]
        if axes:
            self.emitter.nests.set_from_flat(axes, context.number_program(), context.top, 0)
        if self.program.part is not None:
            self._set_part(self.program.part)

    def _set_part(self, part: Part) -> None:
        """The number of the block that this program sums."""
        first = self.emitter.coords[part.of].base
        assert first is not None
        number = binary("//", first, self.emitter.tile.block(part.of))
        self.emitter.coords.set_element(part.axis, number, self.context.top, 0)

    def begin(self, scope: Scope | None = None) -> None:
        """What is carried, at first; of a block of steps in the scope of that."""
        scope = scope or self.context.top
        for state in self.program.states:
            value = self._in_all_lanes(state, state.initial.value, scope)
            self.labels[state] = self.context.names.fresh(self._wish(state))
            scope.define(self.labels[state], value)

    def _wish(self, state: LoopState) -> str:
        return name_of(state.update) or name_of(state.initial) or "state"

    def _in_all_lanes(self, state: LoopState, term: Term, scope: Scope) -> Expr:
        """A value in the shape that is carried, which is one in all turns."""
        value = as_tensor(term, self.values.value(term, scope))
        is_missing = self.emitter.tile.is_missing_lanes(state.axes, term.axes)
        return self.emitter.tile.broadcast(value, state.axes) if is_missing else value

    # ------------------------------------------------------------------ a turn
    def emit(self) -> None:
        """for t in tl.range(0, T): the stores of a step, then what is carried into the next."""
        self._walk(self.context.top, self.context.sizes.text(self.program.time.size, "T"))

    def emit_block(self, outer: Scope, first: Expr, count: Expr, slot: Axis) -> None:
        """The same of so many steps, from the first of a block on; `slot`: the axis of their places in it."""
        self._walk(outer, count, first, slot)
        del self.emitter.coords[slot]

    def _walk(self, outer: Scope, steps: Expr, first: Expr | None = None, slot: Axis | None = None) -> None:
        scope, plan = Scope(outer.level + 1, outer), self.context.plan
        variable = self.context.names.fresh("step" if self.is_reversed else "t_at")
        self._set_time(name(variable), steps, scope, first, slot)
        self._fix_states(scope.level)
        for term in self.program.terms:
            if term.op == "matmul":
                self._multiply(term, scope)
            elif term.op == "moved":
                self._move(term, scope)
            elif term.op == "crossed":
                self._cross(term, scope)
        for sink in self.program.in_loop:
            self.emitter.stores.store(sink, scope)
        self._carry_on(scope)
        pipelined = {"num_stages": literal(plan.stages)} if plan.stages > 1 else {}
        outer.body.append(For(variable, call("tl.range", literal(0), steps, **pipelined), scope.body))
        del self.emitter.coords[self.program.time]

    def _set_time(self, turn: Expr, steps: Expr, scope: Scope, first: Expr | None, slot: Axis | None) -> None:
        """The step that a turn of the loop takes; of those of a block, its place there as well."""
        time = self.program.time
        if self.is_reversed:
            turn = binary("-", binary("-", steps, literal(1)), turn)
        if slot is not None and first is not None:
            turn = self._define(slot, turn, scope)
            self.emitter.coords[slot] = Coord(turn, None, None, scope.level)
            turn = binary("+", first, turn)
        at = self._define(time, turn, scope)
        self.emitter.coords[time] = Coord(at, None, None, scope.level)
        self.emitter.levels.clear()

    def _define(self, axis: Axis, place: Expr, scope: Scope) -> Expr:
        """A place along an axis; another loop in front of this one may have its name."""
        top = self.context.top
        label = axis.name if ("named", axis.name) not in top.memo else self.context.names.fresh(axis.name)
        top.memo["named", axis.name] = name(label)
        return scope.define(label, call("tl.cast", place, literal("tl.int64")))

    def _fix_states(self, level: int) -> None:
        for state in self.program.states:
            self.values.accumulated[state.before] = name(self.labels[state])
            self.emitter.levels.fix(state.before, level)

    def _multiply(self, term: Term, scope: Scope) -> None:
        """tl.dot of a tile of rows with a matrix that has the summed axis first."""
        rows, matrix = term.args
        dtype = multiplied_in(rows, matrix, term)
        (column,) = matrix.axes - {term.param, self.program.time}
        left = operand(rows, dtype, self._without_others(rows, column, self.values.value(rows, scope)))
        with self._dimensions(term.param, column):
            value = self._without_others(matrix, term.param, self.values.value(matrix, scope))
            right = operand(matrix, dtype, value)
            right = self.context.let(scope.home(self.emitter.levels.of(matrix)), name_of(matrix) or "matrix", right)
        product = call("tl.dot", left, right, **self.context.precision(dtype))
        product = self.context.round_reduction(term, product)
        label = scope.define(self.context.names.fresh(name_of(term), "product"), product, self.context.comment(term))
        self.values.accumulated[term] = label
        self.emitter.levels.fix(term, scope.level)

    def _without_others(self, term: Term, axis: Axis, value: Expr) -> Expr:
        """A tile that is summed along an axis, with zeros beyond its end: 0 / 0 is NaN there, even times zero."""
        mask = self.emitter.coords[axis].mask
        if axis not in term.axes or mask is None or self.emitter.folding.pad(term, axis) == 0.0:
            return value
        return call("tl.where", mask, as_tensor(term, value), literal(number(0, term.dtype)))

    def _move(self, term: Term, scope: Scope) -> None:
        """tl.gather along an axis that is whole in the tile; elsewhere is nothing, which nothing asks for."""
        axis, place = term.param
        state = term.args[0]
        tile, last = self.emitter.tile, literal(self.emitter.tile.block_sizes[axis] - 1)
        lane = self.emitter.coords[axis].lane
        assert lane is not None
        scalar = self.context.sizes.text(place.offset, "shift")
        sign = dict(place.terms)[axis]
        at = binary("+", lane, scalar) if sign == 1 else binary("-", scalar, lane)
        inside = call("tl.minimum", call("tl.maximum", at, literal(0)), last)
        index = scope.home(0).define(self.context.names.fresh("source"), tile.broadcast(inside, state.axes))
        dim = literal(tile.dims.index(axis))
        gathered = call("tl.gather", self.values.value(state, scope), index, dim)
        self.values.accumulated[term] = self.context.let(scope, "neighbour", gathered)
        self.emitter.levels.fix(term, scope.level)

    def _cross(self, term: Term, scope: Scope) -> None:
        """tl.permute of a tile: its lanes along another axis, which is as long."""
        (state,) = term.args
        dims = self.emitter.tile.dims
        if not {*dims} >= {*term.param}:
            assert term.node is not None
            raise Unfusible(term.node, "a step reads what it carries along the sum of a product, beside that")
        swapped = dict(zip(term.param, reversed(term.param), strict=True))
        order = [dims.index(swapped.get(axis, axis)) for axis in dims]
        value = as_tensor(state, self.values.value(state, scope))
        across = call("tl.permute", value, literal(repr(tuple(order))))
        self.values.accumulated[term] = self.context.let(scope, "across", across)
        self.emitter.levels.fix(term, scope.level)

    @contextmanager
    def _dimensions(self, *axes: Axis) -> Iterator[None]:
        """Another tile for a while, of axes that are whole in it."""
        tile, coords = self.emitter.tile, self.emitter.coords
        dims, before = tile.dims, coords.before(axes)
        tile.dims = axes
        for axis in axes:
            coords.set_whole(axis)
        yield
        tile.dims = dims
        coords.restore(axes, before)

    def _carry_on(self, scope: Scope) -> None:
        """All that is carried changes at once."""
        changed = []
        for state in self.program.states:
            value = self._in_all_lanes(state, state.update.value, scope)
            changed.append((self.labels[state], self._apart(value, scope)))
        for label, value in changed:
            if value.text != label:
                scope.body.append(Accumulate(label, "=", value))

    def _apart(self, value: Expr, scope: Scope) -> Expr:
        """What is carried reads the states before the step: with several of them, under a name of its own."""
        if len(self.program.states) == 1:
            return value
        is_state = value.text in self.labels.values()
        return scope.define(self.context.names.fresh("before" if is_state else "after"), value)

    # ------------------------------------------------------------------ behind it
    def keep(self, sinks: Sequence[Sink], scope: Scope) -> None:
        """Stores of what is carried into a block of steps."""
        self.emitter.levels.clear()
        self._fix_states(scope.level)
        for sink in sinks:
            self.emitter.stores.store(sink, scope)

    def keep_last(self) -> None:
        """What is carried to the end is known now."""
        self.emitter.levels.clear()
        for state in self.program.states:
            self.values.accumulated[state.last] = name(self.labels[state])
            self.emitter.levels.fix(state.last, 0)

    def finish(self) -> None:
        """The stores of what is known now."""
        self.keep_last()
        for sink in self.program.after:
            self.emitter.stores.store(sink, self.context.top)
