"""Roles of the axes of a loop over time: the steps, the axes that a program covers whole, and the grid.

    time    the steps, one after the other
    whole   axes along which a step reduces: in the tile from end to end
    grid    all others: each of their places goes through time by itself
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ....ir.errors import Unfusible
from ....ir.types import Size
from ...program.axes import REDUCTIONS, SCANS, Axis, Index, Materialize, Program, Sink, Term, terms_below
from ...program.loops import HELD, INITIAL, REGISTERS, STATE
from ...program.sizes import divide, nonnegative, positive, same, tidy
from ...program.terms import TermTable
from .products import with_products


@dataclass(frozen=True)
class Carried:
    """The param of a `carried` or `last` term: the number of a state, and its axes."""

    number: int
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class LoopState:
    """A carried value: what it is at first, and after a step; `before` and `last` are how the program reads it."""

    number: int
    axes: tuple[Axis, ...]
    dtype: str
    initial: Sink
    update: Sink
    before: Term
    last: Term


class Part(NamedTuple):
    """The number of the block of lanes along an axis that a program sums, of so many lanes each."""

    axis: Axis
    of: Axis
    block: int


class LoopProgram(Program):
    """The sinks of a kernel with a loop: its stores are `sinks`, its states are beside them.

    `part`: where each program sums a part of what is summed.
    """

    def __init__(
        self, sinks: Sequence[Sink], states: Sequence[LoopState], time: Axis, part: Part | None = None
    ) -> None:
        super().__init__([*sinks, *(s for state in states for s in (state.initial, state.update))])
        self.sinks, self.states, self.time, self.part = tuple(sinks), tuple(states), time, part
        self.axes = tuple(sorted({*self.axes, time}, key=lambda a: a.order))

    @property
    def in_loop(self) -> list[Sink]:
        """Stores of every step."""
        return [s for s in self.sinks if self.time in s.axes]

    @property
    def after(self) -> list[Sink]:
        """Stores of what is known once the loop is over."""
        return [s for s in self.sinks if self.time not in s.axes]

    @property
    def walks(self) -> tuple[LoopProgram, ...]:
        """The loops of the kernel, one behind the other."""
        return (self,)

    @property
    def beside(self) -> tuple[Axis, ...]:
        """Axes of blocks of steps, and of places in them, which are neither lanes nor the grid."""
        return ()

    @property
    def products(self) -> list[Term]:
        """The products of matrices in a step, operands first."""
        return [t for t in self.terms if t.op == "matmul"]

    @property
    def depths(self) -> frozenset[Axis]:
        """The axes that products sum along, which are rows of what is multiplied with."""
        return frozenset(t.param for t in self.products)

    @property
    def whole(self) -> frozenset[Axis]:
        """The axes that steps reduce along, or move or turn what is carried along, and the columns of products."""
        return self._whole_in(self.terms)

    @cached_property
    def whole_in_steps(self) -> frozenset[Axis]:
        """The same of steps alone, without what is made of what is carried to the end."""
        return self._whole_in(terms_below(t for s in self._of_steps() for t in s.terms))

    def _of_steps(self) -> list[Sink]:
        return [*self.in_loop, *(s for state in self.states for s in (state.initial, state.update))]

    def _whole_in(self, terms: Sequence[Term]) -> frozenset[Axis]:
        reduced = {a for t in terms if t.op in (*REDUCTIONS, *SCANS, "crossed") for a in t.param}
        reduced |= {t.param[0] for t in terms if t.op == "moved"}
        reduced -= {self.part.of} if self.part is not None else set()
        columns = (t.args[1].axes - {t.param} for t in terms if t.op == "matmul")
        return frozenset(reduced.union(*columns))


def by_loop(sinks: Sequence[Sink], times: dict[int, Axis]) -> list[set[int]]:
    """The goals of each loop, by number. What is in none is stored beside one that walks all of its places."""
    goals: defaultdict[frozenset[Axis], set[int]] = defaultdict(set)
    walked: defaultdict[frozenset[Axis], set[Axis]] = defaultdict(set)
    for sink in (s for s in sinks if s.goal >= 0):
        own = times_of(sink, times)
        goals[own].add(sink.goal)
        walked[own] |= set(sink.axes).union(*(t.axes for t in terms_below(sink.terms)))
    alone = frozenset[Axis]()
    if len(goals) == 2 and alone in goals:
        (loop,) = goals.keys() - {alone}
        if walked[alone] <= walked[loop]:
            return [goals[loop] | goals[alone]]
    return list(goals.values())


def times_of(sink: Sink, times: dict[int, Axis]) -> frozenset[Axis]:
    """The loops that a store waits for, or is in."""
    below = terms_below(sink.terms)
    read = {times[t.param.ref.index] for t in below if is_state(t)}
    return frozenset(read) | {a for a in sink.axes if a.turn}


def is_state(term: Term) -> bool:
    """A load of what is carried."""
    return term.op == "load" and term.param.ref.kind in (STATE, INITIAL)


def program_of(table: TermTable, sinks: Sequence[Sink]) -> LoopProgram:
    """The program of one loop. Raises Unfusible where a step reads a state that another lane has."""
    updates = _of_kind(sinks, STATE)
    time = _time_of(updates, sinks)
    _check_order(sinks, time)
    sinks = with_products(table, sinks)
    held = _of_kind(sinks, HELD)
    new: dict[Term, Term] = {}
    for sink in (*_earlier_first(held), *sinks):
        for term in terms_below(sink.terms, new):
            if term not in new:
                new[term] = _with_states(table, term, new, updates, held, time)
    updates, initial = _of_kind(sinks, STATE), _of_kind(sinks, INITIAL)
    states = [_state(table, n, initial[n].of_terms(new), updates[n].of_terms(new), time) for n in sorted(updates)]
    return LoopProgram([s.of_terms(new) for s in sinks if s.ref.kind not in REGISTERS], states, time)


def _time_of(updates: dict[int, Sink], sinks: Sequence[Sink]) -> Axis:
    """The axis of the loop. Where one begins with what another of another length ends with, that is stored between."""
    time, *others = {a for s in updates.values() for a in s.axes if a.turn}
    if others:
        ends = (t.node for s in sinks for t in terms_below(s.terms) if t.op == "last")
        raise Materialize(list(dict.fromkeys(node for node in ends if node is not None)))
    return time


def _of_kind(sinks: Sequence[Sink], kind: str) -> dict[int, Sink]:
    return {s.ref.index: s for s in sinks if s.ref.kind == kind}


def _earlier_first(held: dict[int, Sink]) -> list[Sink]:
    """What a step holds, behind what it is made of. Raises Unfusible."""
    reads = {n: {t.param.ref.index for t in terms_below(s.terms) if is_held(t)} for n, s in held.items()}
    order: dict[int, Sink] = {}
    while late := held.keys() - order.keys():
        ready = {n: held[n] for n in sorted(late) if reads[n] <= order.keys()}
        if not ready:
            raise Unfusible(held[min(late)].node, "a step holds what is made elsewhere")
        order |= ready
    return list(order.values())


def is_held(term: Term) -> bool:
    """A load of what a step holds."""
    return term.op == "load" and term.param.ref.kind == HELD


def _with_states(
    table: TermTable, term: Term, new: dict[Term, Term], updates: dict[int, Sink], held: dict[int, Sink], time: Axis
) -> Term:
    """The term with loads of states as what is carried, and of what is held as what it is."""
    if term.op == "last":
        return _last(table, term, updates[term.args[0].param.ref.index], time)
    if is_state(term) and term.param.ref.kind == INITIAL:
        return term  # what it is when the loop is over: `last` says where
    args = tuple(new[a] for a in term.args)
    if is_state(term):
        return _carried(table, term, args, updates[term.param.ref.index], time)
    if is_held(term):
        sink = held[term.param.ref.index]
        return _elsewhere(table, term, args, sink, new[sink.value])
    return table.make(term.op, *args, dtype=term.dtype, param=term.param, node=term.node)


def _last(table: TermTable, term: Term, sink: Sink, time: Axis) -> Term:
    """What is carried once the loop is over, at its own place, or one element of it."""
    (load,) = term.args
    param = Carried(sink.ref.index, tuple(a for a in sink.axes if a is not time))
    last = table.make("last", dtype=term.dtype, param=param, node=term.node)
    if load.param.place == sink.place:
        return last
    picked = _picked(load, sink)
    if picked is None:
        raise Materialize([n for n in [term.node] if n is not None])
    axis, number = picked
    return _element(table, last, axis, table.const(number, "i64"))


def _element(table: TermTable, state: Term, axis: Axis, place: Term) -> Term:
    """One element of what is carried, along an axis: the sum of it and of zeros."""
    is_there = table.test("eq", table.index(Index.over(axis)), place)
    alone = table.make("where", is_there, state, table.const(0, state.dtype), dtype=state.dtype, node=state.node)
    return table.make("sum", alone, dtype=state.dtype, param=(axis,), node=state.node)


def _picked(load: Term, sink: Sink) -> tuple[Axis, Size] | None:
    """(axis, place along it): the only axis of the state along which a load is at one element."""
    own, place = dict(sink.place.terms), dict(load.param.place.terms)
    missing = [a for a in own if a not in place]
    is_alike = all(own.get(a) == c for a, c in place.items()) and not load.param.indirect
    if len(missing) != 1 or not is_alike or load.dtype == "b1":
        return None
    (axis,) = missing
    number = divide(tidy(load.param.place.offset - sink.place.offset), own[axis])
    return (axis, number) if number is not None and _is_on(axis, number) else None


def _is_on(axis: Axis, number: Size) -> bool:
    """Whether there is a place of that number: beyond the end it is one of the next along an outer axis."""
    if not isinstance(number, int) and positive(tidy(axis.size - number)):
        return True  # counted from the end
    return nonnegative(number) and not nonnegative(number - axis.size)


def _carried(table: TermTable, load: Term, args: Sequence[Term], sink: Sink, time: Axis) -> Term:
    """What is carried at the place of a load."""
    axes = tuple(a for a in sink.axes if a is not time)
    own = table.make("carried", dtype=load.dtype, param=Carried(sink.ref.index, (time, *axes)), node=load.node)
    return _elsewhere(table, load, args, sink, own)


def _elsewhere(table: TermTable, load: Term, args: Sequence[Term], sink: Sink, own: Term) -> Term:
    """A tile at the place of a load: at its own, as far along one axis as another element is, along another axis, with
    two axes exchanged, or at one element along one."""
    if load.param.place == sink.place:
        return own
    ways = (("moved", _moved_along), ("crossed", _across), ("crossed", _exchanged))
    for op, way in ways if not load.param.indirect else ():
        param = way(load, sink)
        if param is not None:
            return _in_other_lanes(table, op, own, param)
    if (picked := _picked(load, sink)) is not None:
        return _element(table, own, picked[0], table.const(picked[1], "i64"))
    if (axis := _looked_up(load, sink)) is not None:
        return _element(table, own, axis, args[0])
    raise Unfusible(sink.node, "a step reads what another element carries")


def _in_other_lanes(table: TermTable, op: str, own: Term, param: tuple[Axis, Any]) -> Term:
    """A tile moved or turned along an axis; lanes hold no single bits."""
    if own.axes.isdisjoint(param if op == "crossed" else param[:1]):
        return own
    if own.dtype == "b1":
        bits = table.cast(own, "i32")
        return table.test("ne", _in_other_lanes(table, op, bits, param), table.const(0, "i32"))
    return table.make(op, own, dtype=own.dtype, param=param, node=own.node)


def _across(load: Term, sink: Sink) -> tuple[Axis, Axis] | None:
    """(axis of the state, the axis along which a load reads it)"""
    own, place = dict(sink.place.terms), dict(load.param.place.terms)
    left, new = [a for a in own if a not in place], [a for a in place if a not in own]
    if len(left) != 1 or len(new) != 1 or load.param.place.offset != sink.place.offset:
        return None
    ((mine, other),) = zip(left, new, strict=True)
    is_same = same(mine.size, other.size) and same(own[mine], place[other]) and not other.turn
    return (mine, other) if is_same and all(own[a] == c for a, c in place.items() if a in own) else None


def _exchanged(load: Term, sink: Sink) -> tuple[Axis, Axis] | None:
    """Two axes of the state, which a load reads as its transpose."""
    own, place = dict(sink.place.terms), dict(load.param.place.terms)
    pair = [a for a in own if own[a] != place.get(a)]
    if len(pair) != 2 or own.keys() != place.keys() or load.param.place.offset != sink.place.offset:
        return None
    one, other = pair
    is_turned = same(own[one], place[other]) and same(own[other], place[one])
    return (one, other) if is_turned and same(one.size, other.size) else None


def _looked_up(load: Term, sink: Sink) -> Axis | None:
    """The only axis of the state along which a load is at a place that is data, the same all along it."""
    own, place, steps = dict(sink.place.terms), dict(load.param.place.terms), load.param.indirect
    missing = [a for a in own if a not in place]
    is_alike = all(own.get(a) == c for a, c in place.items()) and same(load.param.place.offset, sink.place.offset)
    if len(missing) != 1 or len(steps) != 1 or not is_alike or load.dtype == "b1":
        return None
    (axis,) = missing
    return axis if same(steps[0], own[axis]) and axis not in load.args[0].axes else None


def _moved_along(load: Term, sink: Sink) -> tuple[Axis, Index] | None:
    """(axis, place along it): the only axis of the state along which a load is elsewhere.

    A place in memory is one step of an axis, or several of an inner one: what guards the load tells of which.
    """
    own, place = dict(sink.place.terms), load.param.place
    elsewhere = [a for a in own if dict(place.terms).get(a) != own[a]]
    if len(elsewhere) > 1 or set(place.walked) != set(own):
        return None
    guarded = {a for guard in load.args for a in guard.axes if a in own}
    sign = -1 if elsewhere else 1
    for axis in elsewhere or _outermost_first(own):
        steps = divide(place.offset, own[axis])
        is_alike = steps is not None and same(dict(place.terms)[axis], tidy(own[axis] * sign))
        if is_alike and steps is not None and guarded <= {axis}:
            return axis, Index.over(axis) * sign + steps
    return None


def _outermost_first(strides: dict[Axis, Size]) -> list[Axis]:
    """The axes, those first whose strides are multiples of most others."""
    multiples = {a: sum(divide(strides[a], n) is not None for n in strides.values()) for a in strides}
    return sorted(strides, key=lambda a: -multiples[a])


def _state(table: TermTable, number: int, initial: Sink, update: Sink, time: Axis) -> LoopState:
    axes = tuple(a for a in update.axes if a is not time)
    before = table.make("carried", dtype=update.dtype, param=Carried(number, (time, *axes)))
    last = table.make("last", dtype=update.dtype, param=Carried(number, axes))
    return LoopState(number, axes, update.dtype, initial, update, before, last)


def _check_order(sinks: Sequence[Sink], time: Axis) -> None:
    """What a step reads is there before the loop or in it; what is summed is not the steps."""
    for sink in sinks:
        below = terms_below(sink.terms)
        is_within, is_step = time in sink.axes, any(a.turn for a in sink.axes)
        # a step of any loop: one that carries nothing has no states, and is behind those that it reads the end of
        late = [t for t in below if t.op == "last" and (is_step or sink.ref.kind == INITIAL)]
        summed = [t for t in below if t.op in (*REDUCTIONS, *SCANS) and any(a.turn for a in t.param)]
        early = [t for t in below if time in t.axes and not is_within]
        if nodes := [t.node for t in (*late, *summed, *early) if t.node is not None]:
            raise Materialize(nodes)
