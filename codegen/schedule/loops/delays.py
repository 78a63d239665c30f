"""States that hand on what the step before has made: they are made again of what that step has read, and not carried.

    before[t] = x[t - 1]        where t is not the first step, and else what it is at first
    before[t] = f(h[t - 1])     f of what h is before step t
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...program.axes import Axis, Index, Term, terms_below
from ...program.sizes import tidy
from ...program.terms import TermTable
from .roles import LoopProgram, LoopState


def is_delay(state: LoopState) -> bool:
    """What it is in a step is made of what the step before has read: no state goes into it."""
    return not any(t.op == "carried" for t in terms_below([state.update.value]))


def without_delays(table: TermTable, program: LoopProgram) -> LoopProgram:
    """The program that carries as few of these as it can."""
    for number in [s.number for s in program.states]:
        program = _without(table, program, next(s for s in program.states if s.number == number))
    return program


def _without(table: TermTable, program: LoopProgram, state: LoopState) -> LoopProgram:
    others = [s for s in program.states if s is not state]
    before = one_step_before(table, state, program.time, {s.update.value: s.before for s in others})
    if before is None:
        return program
    known = {state.before: before}
    if state.last in program.terms:
        last = _last_step(table, state, program.time, {s.update.value: s.last for s in others})
        known |= {} if last is None else {state.last: last}
    new = table.replaced([*program.terms, *(t for s in program.states for t in s.update.terms)], known)
    states = [s for s in program.states if s is not state or (s.last in program.terms and s.last not in known)]
    states = [replace(s, initial=s.initial.of_terms(new), update=s.update.of_terms(new)) for s in states]
    return LoopProgram([s.of_terms(new) for s in program.sinks], states, program.time, part=program.part)


def one_step_before(table: TermTable, state: LoopState, time: Axis, known: Mapping[Term, Term]) -> Term | None:
    """What a state is before a step, made again; None where that takes more than what is there.

    known: by what other states are after a step, what they are before one.
    """
    op, limit, shift = ("ge", 1, -1) if time.turn == "forward" else ("lt", tidy(time.size - 1), 1)
    is_later = table.test(op, table.index(Index.over(time)), table.const(limit, "i64"))
    return _made_again(table, state, time, known, Index.over(time) + shift, is_later)


def _last_step(table: TermTable, state: LoopState, time: Axis, known: Mapping[Term, Term]) -> Term | None:
    """What a state is in the end, made again."""
    is_any = table.test("ge", table.const(time.size, "i64"), table.const(1, "i64"))
    place = Index(offset=tidy(time.size - 1) if time.turn == "forward" else 0)
    return _made_again(table, state, time, known, place, is_any)


def _made_again(
    table: TermTable, state: LoopState, time: Axis, known: Mapping[Term, Term], place: Index, is_there: Term
) -> Term | None:
    """What a state is after the step at a place, where there is one; what it is at first elsewhere."""
    new: dict[Term, Term] = {}
    for term in terms_below([state.update.value], known):
        if term in known:
            new[term] = known[term]
        elif term.op == "carried":
            return None
        else:
            guards = [is_there] * (term.op == "load" and time in term.axes)
            new[term] = table.moved_of(term, (*(new[a] for a in term.args), *guards), {time: place})
    value = new[state.update.value]
    made = table.make("where", is_there, value, state.initial.value, dtype=value.dtype, node=state.before.node)
    # what is carried has all lanes, also where what it is made of is the same in them: an expanded gradient
    absent = tuple(a for a in state.axes if a not in made.axes)
    return table.make("spread", made, dtype=made.dtype, param=absent, node=made.node) if absent else made
