"""Sums of a step that no state waits for, divided among programs: each sums what it has, another kernel adds these up.

    step      partial[t, part, n] = sum over a block of d, of this program
    merged    y[t, n] = g(sum over part of partial[t, part, n])

A sum that a state adds up from step to step is one of them: the state of each program begins with zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ....ir.types import ITEMSIZE, LOW_FLOATS
from ...kernel import Buffer, Target
from ...program.axes import REDUCTIONS, SCANS, Axis, Index, Sink, Term, terms_below
from ...program.sizes import Hints, cdiv, power_of_two
from ...program.terms import Temporary, TermTable
from ..workload import Workload
from .delays import is_delay, one_step_before
from .recurrences import added_to
from .roles import Carried, LoopProgram, LoopState, Part
from .tiles import HELD, halves, lanes_beside

KEPT = 64
"""Elements along summed axes that stay in one program: sums over few are whole."""
KEPT_LATE, LONG = 16, 32
"""The same where steps only add up what is summed in the end, and there are more steps than so many."""
LEAST = 32
"""Elements of a tile, at least."""
SHARE = 0.08
"""Of the bytes that a loop moves, for partial sums that are written and read: more only where no program holds all."""
Axes = frozenset[Axis]
NONE = Axes()


@dataclass(frozen=True)
class Divided:
    """A loop whose sums are divided: its program, what is stored once they are added up, and the partial sums."""

    program: LoopProgram
    merged: tuple[Sink, ...]
    buffers: tuple[Buffer, ...]


class Sums:
    """How sums over some axes go on, if programs have parts of them. `wrong`: the axes for which that cannot be.

    partial   by term: the axes along which it is yet to be summed; linear in these sums
    late      terms that need the whole of a sum: they are computed once all steps are over
    delays    by what they are before a step: states that hand on what a step has read, which can be read again
    totals    what is added to each state that only adds up
    """

    def __init__(self, program: LoopProgram, axes: Axes) -> None:
        self.program, self.axes = program, axes
        self.partial: dict[Term, Axes] = {}
        self.late: dict[Term, Axes] = {}
        self.wrong: set[Axis] = set()
        self._needs_steps: dict[Term, bool] = {}
        self.delays = {s.before: s for s in program.states if is_delay(s)}
        self.totals = {s: x for s in program.states if (x := added_to(program, s)) is not None}
        self._of_updates = {s.update.value: x for s, x in self.totals.items()}
        self._of_totals = {s.last: x for s, x in self.totals.items()}
        for term in terms_below([*(t for s in program.states for t in s.update.terms), *program.terms]):
            self._take(term)
        for state, added in self.totals.items():
            self.partial[state.before] = self.partial.get(added, NONE)
        for state in program.states:
            self._check_state(state)
        self.wrong.update(a for s in program.sinks for t in s.terms[1:] for a in self._waiting(t))

    def _take(self, term: Term) -> None:
        source = self._of_totals.get(term) or self._of_updates.get(term)
        if source is not None:  # what is added up is partial as what is added to it
            self._set(term, self.partial.get(source, NONE))
            return
        arguments = NONE.union(*(self.partial.get(a, NONE) for a in term.args))
        late = NONE.union(*(self.late.get(a, NONE) for a in term.args))
        is_state = term.op in ("carried", "last") and term not in self.delays
        self._needs_steps[term] = is_state or any(self._needs_steps.get(a, False) for a in term.args)
        if term.op == "sum" and not late and not (arguments and term.dtype in LOW_FLOATS):
            self._set(term, arguments | (self.axes & set(term.param)))
        elif late or arguments:
            self._set_late(term, late | arguments)

    def _set(self, term: Term, axes: Axes) -> None:
        self.partial[term] = axes
        self._needs_steps[term] = True

    def _set_late(self, term: Term, axes: Axes) -> None:
        self.late[term] = axes
        others = [a for a in term.args if a not in self.late and not self.partial.get(a)]
        is_elsewhere = term.op in ("moved", "crossed", "matmul", *SCANS)
        if is_elsewhere or any(self._needs_steps.get(a, False) for a in others):
            self.wrong |= axes

    def _check_state(self, state: LoopState) -> None:
        value = self.totals.get(state, state.update.value)
        is_total = state in self.totals
        self.wrong |= self.late.get(value, NONE) | (NONE if is_total else self.partial.get(value, NONE))
        self.wrong |= NONE.union(*(self._waiting(t) for t in state.initial.terms))

    def _waiting(self, term: Term) -> Axes:
        return self.partial.get(term, NONE) | self.late.get(term, NONE)

    # ------------------------------------------------------------------ what is between
    @property
    def stored(self) -> list[Term]:
        """The partial sums that something late needs, or a store."""
        wanted = {a for t in self.late for a in t.args} | {s.value for s in self.program.sinks}
        return [t for t in self.program.terms if t in wanted and self.partial.get(t)]

    def is_late(self, sink: Sink) -> bool:
        return bool(self._waiting(sink.value))


# ---------------------------------------------------------------------- which axes
def divisible(program: LoopProgram) -> Axes:
    """The axes along which all sums may be divided."""
    if program.products:
        return NONE
    axes = {a for t in program.terms if t.op == "sum" for a in t.param} - {program.time}
    for t in program.terms:
        if t.op in (*REDUCTIONS, *SCANS, "crossed") and t.op != "sum":
            axes -= set(t.param)
        elif t.op == "moved":
            axes.discard(t.param[0])
    while axes and (wrong := Sums(program, frozenset(axes)).wrong & axes):
        axes -= wrong
    return frozenset(axes)


def axes_to_divide(w: Workload, program: LoopProgram) -> list[Axis]:
    """The axes of sums, the one with the smallest stride first, that are too long for one program."""
    able, kept, found = divisible(program), 1, list[Axis]()
    for axis in (a for a in reversed(w.order) if a in able):
        kept *= w.size[axis]
        if kept > _most_kept(w, program, axis):
            found.append(axis)
    return found


def too_many_late(w: Workload, program: LoopProgram) -> bool:
    """What is made of the states in the end needs more elements in one program than steps do."""
    late = program.whole - program.whole_in_steps
    return math.prod(w.size[a] for a in late) > KEPT


def sums_beside(program: LoopProgram) -> set[int]:
    """The goals that are sums along more than steps reduce along, and read nothing of the loop: any kernel has them."""
    late = program.whole - program.whole_in_steps

    def is_beside(sink: Sink) -> bool:
        below = terms_below(sink.terms)
        summed = {a for t in below if t.op in (*REDUCTIONS, *SCANS) for a in t.param}
        return bool(summed & late) and not any(t.op in ("last", "carried") for t in below)

    beside = [s for s in program.after if is_beside(s)]
    return {s.goal for s in beside} - {s.goal for s in program.sinks if s not in beside}


def _most_kept(w: Workload, program: LoopProgram, axis: Axis) -> int:
    """Elements along this axis, and those before it, that stay in one program."""
    is_late = axis not in program.whole_in_steps and w.size[program.time] > LONG
    return KEPT_LATE if is_late else KEPT


def divided_sums(
    table: TermTable, program: LoopProgram, target: Target, hints: Hints, first: int
) -> Divided | None:  # fmt: skip
    """The loop with its sums divided, where that pays; `first`: the number of the first temporary for partial sums."""
    division = Division.of(table, Workload(program, target, hints), program)
    block = None if division is None else division.block()
    return None if division is None or block is None else division.divided(block, first)


# ---------------------------------------------------------------------- the programs
@dataclass(frozen=True)
class Division:
    """Sums over `axes`, the first of them by blocks of lanes, the others element by element."""

    table: TermTable
    w: Workload
    program: LoopProgram
    axes: tuple[Axis, ...]

    @staticmethod
    def of(table: TermTable, w: Workload, program: LoopProgram) -> Division | None:
        axes = tuple(axes_to_divide(w, program))
        return Division(table, w, program, axes) if axes else None

    @cached_property
    def sums(self) -> Sums:
        return Sums(self.program, frozenset(self.axes))

    @property
    def lanes(self) -> Axis:
        return self.axes[0]

    @cached_property
    def held(self) -> int:
        """The elements of a tile along axes that stay whole."""
        whole = [a for a in self.program.whole if a not in self.axes]
        return math.prod(power_of_two(self.w.size[a]) for a in whole)

    @cached_property
    def grid(self) -> list[Axis]:
        """The axes of the grid beside that of the lanes that are summed, the largest stride first."""
        whole = self.program.whole - set(self.axes)
        return [a for a in self.w.order if a not in whole and a is not self.lanes and not a.turn]

    @cached_property
    def beside(self) -> int:
        """Lanes along the axis with the smallest stride, where that is not summed."""
        order = [a for a in self.w.order if a is self.lanes or a in self.grid]
        return 1 if order[-1] is self.lanes else lanes_beside(self.w.size[order[-1]])

    def block(self) -> int | None:
        """Lanes of a program: as many as leave each unit one, and partial sums few; None where that pays nothing."""
        whole = self.held * math.prod(power_of_two(self.w.size[a]) for a in self.axes)
        is_forced, units = whole > HELD, self.w.target.units
        largest = min(power_of_two(self.w.size[self.lanes]) // 2, HELD // (self.held * self.beside))
        blocks = [n for n in halves(largest) if n * self.held * self.beside >= LEAST]
        if not blocks or (not is_forced and self._programs(NONE) >= units):
            return None
        light = [n for n in blocks if self.bytes_between(n) <= SHARE * self.bytes_moved]
        if not light:
            return blocks[0] if is_forced else None
        divided = self._programs(frozenset(self.axes))
        busy = [n for n in light if divided * self._parts(n) >= units]
        return busy[0] if busy else light[-1]

    def _programs(self, divided: Axes) -> int:
        """The programs for one block of the lanes that are summed, if these axes are divided."""
        grid = [a for a in self.grid if a not in self.axes or a in divided]
        return -(-math.prod(max(1, self.w.size[a]) for a in grid) // self.beside)

    def _parts(self, block: int) -> int:
        return -(-self.w.size[self.lanes] // block)

    @cached_property
    def bytes_moved(self) -> int:
        return sum(t.itemsize * self.w.elements(t.axes) for t in self.program.traffic())

    def bytes_between(self, block: int) -> int:
        """Bytes of partial sums, which are written and read."""
        total = 0
        for term in self.sums.stored:
            axes = self.sums.partial[term]
            beside = self.w.elements({*term.axes, *axes} - {self.lanes})
            total += 2 * ITEMSIZE[_wide(term.dtype)] * beside * (self._parts(block) if self.lanes in axes else 1)
        return total

    # ------------------------------------------------------------------ terms
    def divided(self, block: int, first: int) -> Divided:
        """With so many lanes in a program; `first`: the number of the first temporary that holds partial sums."""
        part = self.table.axes.axis(("part", self.lanes), cdiv(self.lanes.size, block))
        partials = [_Partial(self, t, part, first + at) for at, t in enumerate(self.sums.stored)]
        new = self._terms()
        early = [s.of_terms(new) for s in self.program.sinks if not self.sums.is_late(s)]
        states = [self._state(s, new) for s in self.program.states]
        stores = [*early, *(p.sink(new) for p in partials)]
        program = LoopProgram(stores, states, self.program.time, part=Part(part, self.lanes, block))
        late = [s for s in self.program.sinks if self.sums.is_late(s)]
        return Divided(program, tuple(self._merged(late, partials)), tuple(p.memory.buffer for p in partials))

    def _terms(self) -> dict[Term, Term]:
        """What each program computes of each term."""
        new: dict[Term, Term] = {}
        roots = [t for s in self.program.states for t in (*s.initial.terms, *s.update.terms, s.before, s.last)]
        for term in terms_below([*roots, *self.program.terms]):
            if term not in self.sums.late:
                new[term] = self._term(term, tuple(new[a] for a in term.args))
        return new

    def _term(self, term: Term, args: tuple[Term, ...]) -> Term:
        axes = self.sums.partial.get(term, NONE)
        if not axes or term.op == "add":
            return self.table.again(term, args)
        if term.op != "sum":
            return self.table.make(term.op, dtype=term.dtype, param=self._carried(term, axes), node=term.node)
        summed = tuple(a for a in term.param if a not in self.axes[1:])
        dtype = _wide(term.dtype)
        wide = self.table.cast(args[0], dtype, term.node)
        return self.table.make("sum", wide, dtype=dtype, param=summed, node=term.node) if summed else wide

    def _carried(self, term: Term, axes: Axes) -> Carried:
        own = [*term.param.axes, *(a for a in self.axes[1:] if a in axes)]
        return Carried(term.param.number, tuple(own))

    def _state(self, state: LoopState, new: dict[Term, Term]) -> LoopState:
        axes = self.sums.partial.get(state.before, NONE)
        beside = tuple(a for a in self.axes[1:] if a in axes)
        initial, update = state.initial.of_terms(new), state.update.of_terms(new)
        if axes:
            initial = replace(initial, value=self.table.const(0, state.dtype))
        update = replace(update, axes=(*update.axes, *beside))
        own = (*state.axes, *beside)
        return replace(state, axes=own, initial=initial, update=update, before=new[state.before], last=new[state.last])

    # ------------------------------------------------------------------ once all steps are over
    def _merged(self, late: Sequence[Sink], partials: Sequence[_Partial]) -> Iterator[Sink]:
        """The stores of what needs whole sums; steps are an axis like any other."""
        table, time = self.table, self.program.time
        totals = {p.term: self._total(p) for p in partials}
        new = table.replaced([s.value for s in late], totals | self._delayed())
        steps = {time: Index.over(table.axes.axis(("steps of", time), time.size))}
        for sink in (s.of_terms({**{t: t for t in s.terms}, **new}) for s in late):
            axes = tuple(steps[a].walked[0] if a is time else a for a in sink.axes)
            place, value = sink.place.renamed(steps), table.moved(sink.value, steps)
            yield replace(sink, value=value, place=place, axes=axes)

    def _delayed(self) -> dict[Term, Term]:
        """By what is carried from one step to the next alone: the same, made again of what the step before has read."""
        found = {c: one_step_before(self.table, s, self.program.time, {}) for c, s in self.sums.delays.items()}
        return {c: term for c, term in found.items() if term is not None}

    def _total(self, partial: _Partial) -> Term:
        term, load = partial.term, partial.memory.load(self.table)
        total = self.table.make("sum", load, dtype=load.dtype, param=partial.summed, node=term.node)
        total = self.table.cast(total, term.dtype, term.node)
        state = next((s for s in self.program.states if s.last is term), None)
        if state is None:
            return total
        return self.table.make("add", state.initial.value, total, dtype=term.dtype, node=term.node)


@dataclass(frozen=True)
class _Partial:
    """The partial sums of one term: a buffer, the store into it, and the load of it."""

    division: Division
    term: Term
    part: Axis
    number: int

    @cached_property
    def summed(self) -> tuple[Axis, ...]:
        """The axes of the buffer along which it is yet to be summed."""
        axes = self.division.sums.partial[self.term]
        return tuple(self.part if a is self.division.lanes else a for a in self.division.axes if a in axes)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """As they lie in memory: steps, then parts where their elements would be."""
        axes = self.division.sums.partial[self.term] | self.term.axes
        order = [a for a in self.division.w.order if a in axes]
        own = [self.part if a is self.division.lanes and a not in self.term.axes else a for a in order]
        return tuple(sorted(own, key=lambda a: not a.turn))

    @cached_property
    def memory(self) -> Temporary:
        node = self.term.node
        label = f"{(node.origin.name if node is not None else None) or self.term.op}_parts"
        return Temporary(self.number, label, _wide(self.term.dtype), self.axes, node)

    def sink(self, new: dict[Term, Term]) -> Sink:
        node = self.term.node or self.division.program.states[0].update.node
        return self.memory.store(new[self.term], node)


def _wide(dtype: str) -> str:
    return "f32" if dtype in LOW_FLOATS else dtype
