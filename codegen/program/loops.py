"""Loops over time: what a `scan` gives, in terms of what its body computes in one step, and of what is carried.

    y[t, i]    the body's output, in terms of state[i], which is before the step, and of x[t, i]
    last[i]    last(initial[i]): the state once the loop is over, where it was before

A state is a buffer to the table of terms: the body stores to it and loads from it, at places along axes like any other,
so that axes are joined and merged as in memory. What it is at first and last is another buffer, along its own axes: in
a step it may be read along others. What a step makes and reads at another place than its own is a buffer as well, which
is held for that step. All are in registers all the same (`emit/loops`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any, Final, NoReturn

from ...ir import Value
from ...ir.errors import Unfusible
from ...ir.graph import Graph
from ...ir.loops.pieces import cuts
from ...ir.types import LOW_FLOATS, Size, contiguous_strides, product
from ..kernel import Ref
from .axes import Axis, Index, Materialize, Memory, Part, Sink, Term, Turn
from .builder import Builder, Guards, Place
from .sizes import nonnegative, same, tidy
from .terms import Restart, is_zero

STATE: Final = "state"
INITIAL: Final = "initial"
HELD: Final = "held"
REGISTERS: Final = (STATE, INITIAL, HELD)
"""Kinds of buffers that are in no memory."""


@dataclass(frozen=True)
class State:
    """One carried value of a scan, along the axis of its steps."""

    scan: Value
    number: int
    time: Axis

    @property
    def initial(self) -> Value:
        return self.scan.args[self.number]

    @property
    def parameter(self) -> Value:
        """The body's input."""
        return self.scan.params["body"].graph.inputs[self.number]  # type: ignore[no-any-return]

    @property
    def update(self) -> Value:
        """What the body makes of it."""
        return self.scan.params["body"].graph.outputs[self.number]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Loops:
    """The loops of one kernel, while its values are built: states in the order in which they are met."""

    _builder: Builder

    def result(self, node: Value, index: Place, guards: Guards = ()) -> Term:
        """One result of a scan: what is carried in the end, or what a step gives."""
        if self._builder.path:
            raise Unfusible(node, "a loop within a loop")
        scan, number = (node, 0) if node.prim == "scan" else (node.args[0], node.params["index"])
        if number < scan.params["carries"]:
            state = self._number(State(scan, number, self._time(scan)))
            last = self._loaded(Ref(INITIAL, state), node, index)
            return self._builder.terms.make("last", last, dtype=node.dtype, node=node)
        if not guards:
            self._builder.try_slant(node, index, 0)
        self._walk_along(scan, node, self._builder.axes.settled(index[0]))
        step = self._step(scan)
        return step.guarded(step.graph.outputs[number], index[1:])

    def sinks(self) -> list[Sink]:
        """How each state begins, what every step makes of it, and what it holds; states that only these read, too."""
        found = [self._held_in(scan, value, number) for (scan, value), number in self._builder.held.items()]
        number = 0
        while number < len(self._builder.states):
            found += self._sinks_of(list(self._builder.states)[number], number)
            number += 1
        return found

    # ------------------------------------------------------------------ steps
    def _time(self, scan: Value) -> Axis:
        turn: Turn = "backward" if scan.params["reverse"] else "forward"
        return self._builder.axes.axis(("time", scan.id), scan.params["length"], turn)

    def _walk_along(self, scan: Value, node: Value, index: Index) -> None:
        """What a step gives is asked for at every step: then the axis of whoever asks is that of the steps."""
        axes, time = self._builder.axes, self._time(scan)
        own = axes.settled(Index.over(time))
        if index == own:
            return
        if len(index.terms) == 1 and not index.values and own == Index.over(time):
            ((axis, sign),) = index.terms
            covers = same(axis.size, time.size) and same(index.offset, 0 if sign == 1 else tidy(time.size - 1))
            # what has fewer places than there are steps is stored in some of them
            is_stored = covers or (self._builder.loop is not None and _is_step_each(axis, time, index.offset, sign))
            if is_stored and sign in (1, -1) and axes.is_of_goal(axis, self._builder.goal):
                axes.replace(axis, own * sign + tidy(-index.offset * sign))
            # the steps of another loop in the same direction: both are one
            if covers and sign == 1 and axis.turn == time.turn:
                axes.replace(time, index)
        raise Materialize([node])

    def _step(self, scan: Value) -> Step:
        if scan not in self._builder.steps:
            time = self._builder.axes.settled(Index.over(self._time(scan)))
            self._builder.steps[scan] = Step(self, self._builder, scan, time)
        step = self._builder.steps[scan]
        assert isinstance(step, Step)
        step.goal = self._builder.goal
        return step

    # ------------------------------------------------------------------ states
    def before(self, scan: Value, number: int, node: Value, index: Place) -> Term:
        """A carried value before the step."""
        return self._loaded(Ref(STATE, self._number(State(scan, number, self._time(scan)))), node, index)

    def _number(self, state: State) -> int:
        return self._builder.states.setdefault(state, len(self._builder.states))

    def _loaded(self, state: Ref, node: Value, index: Place) -> Term:
        memory = Memory(state, contiguous_strides(node.shape), node.dtype)
        return self._builder.terms.load(memory, index, (), node)

    def _sinks_of(self, state: Any, number: int) -> list[Sink]:
        axes, shape, dtype = self._builder.axes, state.initial.shape, state.initial.dtype
        own, place, walked = self._walked(("state", state.scan.id, state.number), shape)
        time = axes.walked([Index.over(state.time)])
        initial = self._builder.at(state.initial, own)
        update = self._step(state.scan).guarded(state.update, own)
        return [
            Sink(Ref(INITIAL, number), initial, place, walked, dtype, "store", state.initial),
            Sink(Ref(STATE, number), update, place, (*time, *walked), dtype, "store", state.parameter),
        ]

    def _held_in(self, scan: Value, value: Value, number: int) -> Sink:
        """What a step holds, for all of its places."""
        own, place, walked = self._walked(("held", scan.id, value.id), value.shape)
        time = self._builder.axes.walked([Index.over(self._time(scan))])
        term = self._step(scan).guarded(value, own, again=True)
        return Sink(Ref(HELD, number), term, place, (*time, *walked), value.dtype, "store", value)

    def _walked(self, key: tuple[Hashable, ...], shape: Sequence[Size]) -> tuple[Place, Index, tuple[Axis, ...]]:
        """An index with axes of its own along all dimensions, the place in memory, and the axes."""
        axes = self._builder.axes
        keys = ((*key, d) for d in range(len(shape)))
        own = tuple(Index() if n == 1 else Index.over(axes.axis(k, n)) for k, n in zip(keys, shape, strict=True))
        return own, axes.settled(Index.linear(own, contiguous_strides(shape))), axes.walked(own)


def _is_step_each(axis: Axis, time: Axis, offset: Size, sign: Size) -> bool:
    """Each place along an axis is that of a step: offset + sign * place is in 0 .. steps - 1."""
    if sign not in (1, -1):
        return False
    ends = (offset, tidy(offset + sign * (axis.size - 1)))
    first, last = ends if sign == 1 else ends[::-1]
    return nonnegative(first) and nonnegative(tidy(time.size - 1 - last))


class Step(Builder):
    """The values of a scan's body in one step, which is at `time`."""

    def __init__(self, loops: Loops, outer: Builder, scan: Value, time: Index) -> None:
        held = {v.id: _registers(v, n) for (loop, v), n in outer.held.items() if loop == scan}
        super().__init__(outer.terms, held, outer.rule_of, outer.unrolling, outer.held)
        self.graph: Graph = scan.params["body"].graph
        self.path = (*outer.path, scan.id)
        self._read: dict[int, dict[Hashable, Size]] = {}
        self._loops, self._outer, self._scan, self._time = loops, outer, scan, time

    @property
    def most_questions(self) -> int:
        """Each of what is carried has axes of its own, until they are unified."""
        return super().most_questions * max(1, int(self._scan.params["carries"]))

    def guarded(self, node: Value | None, index: Place, again: bool = False) -> Term:
        """A value of the body; there is no memory between its nodes, but a step may hold them. again: what is held,
        made. Raises Unfusible, and Restart for what is to be held."""
        assert node is not None
        try:
            return self.computed(node, index) if again else self.at(node, index)
        except Materialize as request:
            if own := [n for n in request.nodes if n.graph is self.graph]:
                self._hold(own)
            raise

    def _hold(self, nodes: Sequence[Value]) -> NoReturn:
        for node in nodes:
            if node.id in self.memory or not self._scan.params["carries"]:
                raise Unfusible(self._scan, f"the loop would need memory for {node.prim}")
            self.held[self._scan, node] = len(self.held)
        raise Restart

    def _build(self, node: Value, place: Place, guards: Guards) -> Term:
        if node.prim == "dot" and (parts := _parts_of_sum(node)):
            return self._sum_of_parts(node, place, parts)
        if node.prim != "input":
            return super()._build(node, place, guards)
        number, scan = node.params["index"], self._scan
        carries, steps = scan.params["carries"], scan.params["steps"]
        if number < carries:
            return self._loops.before(scan, number, node, place)
        source = scan.args[number]
        return self._outer.at(source, place if number >= carries + steps else (self._time, *place), guards)

    # ------------------------------------------------------------------ products in parts
    def check_complete(self, node: Value, index: Sequence[Index]) -> None:
        """A product may be asked for in parts, such as the gates that are its columns, no element of it twice."""
        if node.prim != "dot" or not self._is_part(node, index):
            super().check_complete(node, index)
            return
        read = self._read.setdefault(node.id, {})
        read[tuple(i.kind for i in index)] = product(a.size for i in index for a in i.walked)
        if not nonnegative(tidy(product(node.shape) - sum(read.values()))):
            raise Unfusible(self._scan, "parts of a product that overlap would be computed again")

    def _is_part(self, node: Value, index: Sequence[Index]) -> bool:
        axes = [a for i in index for a in i.walked]
        return len(axes) == len(set(axes)) and all(i.is_within(n) for i, n in zip(index, node.shape, strict=True))

    def _sum_of_parts(self, node: Value, place: Place, parts: Sequence[Part]) -> Term:
        """cat(p, q) @ w  ->  p @ w[:n] + q @ w[n:], which are rounded together."""
        self.check_complete(node, place)
        wide = "f32" if node.dtype in LOW_FLOATS else node.dtype
        sums = [s for part in parts if (s := self._sum_along(node, place, part, wide)) is not None]
        total = reduce(lambda a, b: self.terms.make("add", a, b, dtype=wide, node=node), sums)
        return self.terms.cast(total, node.dtype, node)

    def _sum_along(self, node: Value, place: Place, part: Part, wide: str) -> Term | None:
        """The sum along a part of the axis that a product sums along; None where it is zero."""
        label, number, size = part
        axis = self.axes.axis(("over", *self.path, node.id, label, number), size)
        at = dict(zip(node.params["out_axes"], place, strict=True)) | {label: Index.over(axis) + number}
        own = zip(node.args, (node.params["x_axes"], node.params["y_axes"]), strict=True)
        factors = [self.terms.without_zeros(self.factor(v, [at[a] for a in axes])) for v, axes in own]
        if any(is_zero(f) for f in factors):
            return None
        multiplied = self.terms.make("mul", *(self.terms.cast(f, wide) for f in factors), dtype=wide, node=node)
        return self.terms.make("sum", multiplied, dtype=wide, param=(axis,), node=node)


def _registers(value: Value, number: int) -> Memory:
    return Memory(Ref(HELD, number), contiguous_strides(value.shape), value.dtype)


def _parts_of_sum(node: Value) -> list[Part]:
    """The parts along which a product of a concatenation is taken one by one; none where it is one sum."""
    x_axes, y_axes, out_axes = (node.params[p] for p in ("x_axes", "y_axes", "out_axes"))
    summed = set((*x_axes, *y_axes)) - set(out_axes)
    if len(summed) != 1 or not summed <= {*x_axes} & {*y_axes}:
        return []
    (label,) = summed
    dims = ((node.args[0], x_axes.index(label)), (node.args[1], y_axes.index(label)))
    found = next((c for v, dim in dims if (c := cuts(v, dim))), [])
    end = node.args[0].shape[dims[0][1]]
    return [Part(label, a, tidy(b - a)) for a, b in pairwise([0, *found, end])] if found else []
