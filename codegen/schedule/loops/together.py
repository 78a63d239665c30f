"""Loops side by side: such as read the same, or read nothing at all step by step, go through time together.

    fs[t] from x[t];  ss[t] from x[t], in another loop     ->    one loop, that reads x once
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from ....ir.switches import is_on
from ...program.axes import REDUCTIONS, SCANS, Axis, Index, Sink, terms_below
from ...program.loops import HELD, INITIAL, REGISTERS, STATE
from ...program.sizes import same
from ...program.terms import TermTable
from .roles import is_state

MOST = 8
"""States of loops that are one."""


def times_of_states(sinks: Sequence[Sink]) -> dict[int, Axis]:
    """The axis of its steps, by the number of a state."""
    return {s.ref.index: next(a for a in s.axes if a.turn) for s in sinks if s.ref.kind == STATE}


def time_of_registers(sink: Sink, times: Mapping[int, Axis]) -> Axis:
    """The axis of the steps of a loop, by what they carry or hold."""
    return times[sink.ref.index] if sink.ref.kind == INITIAL else next(a for a in sink.axes if a.turn)


def together(table: TermTable, sinks: list[Sink]) -> list[Sink]:
    """The sinks with one axis for the steps of loops that go together."""
    while is_on("side_by_side") and (pair := next(_pairs(sinks), None)) is not None:
        keep, drop = pair
        sinks = table.renamed(sinks, {drop.time: Index.over(keep.time)})
    return sinks


def _pairs(sinks: Sequence[Sink]) -> Iterator[tuple[_Loop, _Loop]]:
    times = times_of_states(sinks)
    loops = [_Loop(time, sinks, times) for time in dict.fromkeys(times.values())]
    for one, other in combinations(sorted(loops, key=lambda loop: loop.is_aimless), 2):
        if one.goes_with(other):
            yield one, other


class _Loop:
    """The steps along one axis: what they compute, and the loops that they wait for."""

    def __init__(self, time: Axis, sinks: Sequence[Sink], times: Mapping[int, Axis]) -> None:
        self.time = time
        own = {n for n, axis in times.items() if axis is time}
        self.sinks = [s for s in sinks if (s.ref.kind in (STATE, INITIAL) and s.ref.index in own) or time in s.axes]
        self.terms = terms_below(t for s in self.sinks for t in s.terms)
        self.states, self.reads = len(own), {times[t.param.ref.index] for t in self.terms if is_state(t)}
        self.stored = {s.ref for s in self.sinks if s.ref.kind not in REGISTERS}
        self.loaded = {t.param.ref for t in self.terms if t.op == "load"}

    @property
    def is_aimless(self) -> bool:
        """Nothing is read or given step by step: it may run either way."""
        given = any(s.ref.kind not in (STATE, HELD) and self.time in s.axes for s in self.sinks)
        return not given and not any(self.time in t.axes for t in self.terms)

    @property
    def places(self) -> set[tuple[object, Index]]:
        """What is read step by step, without the axis of these."""
        found = (t.param for t in self.terms if t.op == "load" and self.time in t.param.place.walked)
        return {(access.ref, access.place.renamed({self.time: Index()})) for access in found}

    @property
    def whole(self) -> set[Axis]:
        """The axes that steps go over from end to end."""
        return {a for t in self.terms if t.op in (*REDUCTIONS, *SCANS) for a in t.param}

    def goes_with(self, other: _Loop) -> bool:
        """Neither waits for the other, and they have something in common: what they read, or a direction to go."""
        is_apart = other.time not in self.reads and self.time not in other.reads
        is_apart = is_apart and self.stored.isdisjoint(other.loaded) and other.stored.isdisjoint(self.loaded)
        if not is_apart or not same(self.time.size, other.time.size) or self.states + other.states > MOST:
            return False
        if other.is_aimless:
            return other.whole <= self.whole
        return self.time.turn == other.time.turn and self.whole == other.whole and bool(self.places & other.places)
