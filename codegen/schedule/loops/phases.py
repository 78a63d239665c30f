"""Time in chunks, where a linear recurrence has few elements and many steps: three kernels instead of one.

    chunks   program (chunk, block):   p[chunk], e[chunk]   the product of factors, and the end of what begins with zero
    joined   over the chunks at once:  h = p[chunk] * h + e[chunk], and h before each chunk to memory
    again    program (chunk, block):   the steps of a chunk, from its own h

What is read twice is what factors and rests are made of; p, e and h are as many elements as there are chunks of states.
What steps only add up begins with zero in every chunk; a kernel behind these adds up what the chunks have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import sympy

from ....ir import Value
from ....ir.switches import is_on
from ....ir.types import Size, product
from ...kernel import WORTH, Buffer
from ...program.axes import Axis, Sink, Term, terms_below
from ...program.sizes import cdiv, evaluate_size, whole_times
from ...program.terms import Temporary, TermTable, is_zero
from ..workload import Workload
from .recurrences import Linear, added_to
from .roles import Carried, LoopProgram, LoopState
from .tiles import LoopTile

MOST = 64
"""Chunks, at most: they are joined as one tile of steps is scanned."""
LEAST = 4
"""Tiles of steps of a chunk, at least: with fewer, two more launches take longer than what they save (`Estimate`)."""
LEAST_OF_FOUR = 20
"""Tiles of steps beside the number of chunks, at least, where a fourth launch adds up what these have."""
TURN, LAUNCH = 1.0, 3.0
"""Microseconds that a tile of steps is taken to need, a load and a scan that wait for one another; and a launch."""
LARGEST: Final = {"bf16": 2.0**62, "f32": 2.0**62, "f64": 2.0**510}
"""Below it, factor * state + rest is finite whatever is between: beyond, time is walked step by step."""
WIDE: Final = {"bf16": "f32"}
"""The dtype of what is found of a chunk, where it is not that of the state."""


class Estimate(NamedTuple):
    """Microseconds of one launch and of several, where the device has room for all chunks at once."""

    whole: float
    in_chunks: float

    @staticmethod
    def of(turns: int, chunks: int, launches: int) -> Estimate:
        """The turns of a chunk are taken twice, but by what adds up alone."""
        walked, passes = -(-turns // chunks), 1 if launches < 3 else 2
        return Estimate(turns * TURN + LAUNCH, (passes * walked + 1) * TURN + launches * LAUNCH)


def wanted_chunks(w: Workload, program: LoopProgram, tile: LoopTile, states: Iterable[LoopState]) -> Size:
    """How many chunks would give each multiprocessor two programs, as far as time is long enough; one at least."""
    if not is_on("chunks_of_time"):
        return 1
    programs = programs_of(tile)
    busy = max(1, programs) if isinstance(programs, int) else sympy.Max(1, programs)
    by_device = whole_times(2 * w.target.units, busy)
    kinds = {added_to(program, s) is None for s in states}
    turns = cdiv(program.time.size, tile.blocks[program.time])
    by_length = [whole_times(turns, LEAST), *([whole_times(turns - LEAST_OF_FOUR, 1)] if len(kinds) == 2 else [])]
    if all(isinstance(n, int) for n in (by_device, *by_length)):
        return min(MOST, by_device, *by_length)
    return sympy.Min(MOST, by_device, *by_length)


def programs_of(tile: LoopTile) -> Size:
    """The programs that there are for one chunk."""
    return product(cdiv(a.size, tile.blocks.get(a, 1)) for a in tile.grid)


def ends_of(stores: Iterable[Sink]) -> list[Value]:
    """What is carried to the end and read by these stores."""
    below = terms_below(t for s in stores for t in s.terms)
    return [t.node for t in below if t.op == "last" and t.node is not None]


def without_late(program: LoopProgram) -> LoopProgram:
    """What each chunk computes: axes along which totals are summed in the end need not be in one program."""
    late = late_stores(program)
    kept = [s for s in program.sinks if s not in late]
    return LoopProgram(kept, program.states, program.time, part=program.part) if late else program


def why_whole(program: LoopProgram, linear: dict[LoopState, Linear]) -> str:
    """Why these recurrences are not taken in chunks of time; nothing where they may be."""
    own = {s: pair for s, pair in linear.items() if added_to(program, s) is None}
    if any(s.dtype not in LARGEST for s in own):
        return "float16 overflows within a chunk"
    parts = [t for pair in own.values() for t in pair if t is not None]
    return "what is carried is read by what else is carried" * any(t.op == "carried" for t in terms_below(parts))


def chunks_at(wanted: Size, w: Workload) -> int:
    """A power of two of chunks; 1 leaves time whole."""
    count = evaluate_size(wanted, w.hints)
    return 1 if count < WORTH else 1 << count.bit_length() - 1


@dataclass(frozen=True)
class Joining:
    """The programs that find the states before chunks: what each chunk makes of them, then all chunks in order."""

    chunks: LoopProgram
    ends: tuple[tuple[LoopState, LoopState, Linear], ...]
    """Of each state the product of its factors, what it is in the end, and its recurrence."""
    joined: LoopProgram
    joins: dict[LoopState, Linear]
    steps: dict[LoopState, Linear]
    """The recurrence of the steps below each that joins chunks."""


@dataclass(frozen=True)
class Phases:
    """The programs of the three kernels, over the axis of the chunks.

    `joining`: none where all that is carried is added up. `again`: none where no step is stored and nothing added up.
    `merged`: the stores of what the chunks have added up.
    """

    axis: Axis
    joining: Joining | None
    again: LoopProgram | None
    linear: dict[LoopState, Linear]
    merged: tuple[Sink, ...]
    buffers: tuple[Buffer, ...]


def phases_of(
    table: TermTable, program: LoopProgram, linear: dict[LoopState, Linear], order: Sequence[Axis], chunks: int,
    first: int,
) -> Phases:  # fmt: skip
    """Time in so many chunks; `first`: the number of the first temporary that holds what is found of them."""
    axis = table.axes.axis(("chunk",), chunks)
    is_total = {s: added_to(program, s) is not None for s in linear}
    is_needed = bool(program.in_loop) or any(is_total.values())
    late = late_stores(program)
    read = terms_below(t for s in late for t in s.terms)
    of: list[_ChunkedState] = []
    for state, pair in linear.items():
        own = (*state.axes, *_parts_below(program, state))
        order_of = [a for a in order if a in own]
        kept = ("total",) if is_total[state] else _kept(is_needed, state.last in read)
        of.append(_ChunkedState(table, state, pair, axis, order_of, first, kept))
        first += len(kept)
    totals, states = ([s for s in of if is_total[s.state] is side] for side in (True, False))
    joining = _joining(program, states, [s for s in program.after if s not in late])
    begun = {(s.from_zero() if s in totals else s.begun()): s.linear for s in of if is_needed}
    stores = [*program.in_loop, *(s.stored("total", s.state.last) for s in totals)]
    again = LoopProgram(stores, list(begun), program.time, part=program.part) if is_needed else None
    known = {s.state.last: s.total() for s in totals} | {s.state.last: s.last() for s in states if "last" in s.kept}
    known |= {t: s.sum_of_total(t) for s in totals for t in read if s.is_summed_by(t)}
    new = table.replaced([s.value for s in late], known)
    merged = tuple(s.of_terms({**{t: t for t in s.terms}, **new}) for s in late)
    return Phases(axis, joining, again, begun, merged, tuple(b for s in of for b in s.buffers()))


def late_stores(program: LoopProgram) -> list[Sink]:
    """The stores that wait for what all chunks have added up."""
    totals = {s.last for s in program.states if added_to(program, s) is not None}
    return [s for s in program.after if totals.intersection(terms_below(s.terms))]


def _kept(is_needed: bool, is_read: bool) -> tuple[str, ...]:
    """What is kept of each chunk of a state, and of all: what is before it where steps come `again`."""
    return ("factor", "end", *(["start"] if is_needed else []), *(["last"] if is_read else []))


def _parts_below(program: LoopProgram, state: LoopState) -> list[Axis]:
    """The axis of parts, where a state adds up what each program sums of a step."""
    part = program.part
    if part is None:
        return []
    summed = {a for t in terms_below([state.update.value]) if t.op == "sum" for a in t.param}
    return [part.axis] if part.of in summed else []


def _joining(
    program: LoopProgram, states: Sequence[_ChunkedState], after: Sequence[Sink]
) -> Joining | None:  # fmt: skip
    """`after`: what is stored once the states are known in the end."""
    if not states:
        return None
    table, ends, joins = states[0].table, [s.ends() for s in states], [s.joined() for s in states]
    pairs = list(zip(states, ends, strict=True))
    sinks = [s.stored(word, end.last) for s, pair in pairs for word, end in zip(("factor", "end"), pair, strict=True)]
    lasts = {s.state.last: table.cast(j.last, s.state.dtype) for s, j in zip(states, joins, strict=True)}
    stores = [sink.of_terms(table.replaced(sink.terms, lasts)) for sink in after]
    starts = [s.stored("start", j.before) for s, j in zip(states, joins, strict=True) if "start" in s.kept]
    starts += [s.stored("last", j.last) for s, j in zip(states, joins, strict=True) if "last" in s.kept]
    beside = [replace(s.state.update, value=t, axes=t_axes) for s in states for t, t_axes in s.read_by_step()]
    joined = LoopProgram([*starts, *stores], joins, states[0].axis, beside, part=program.part)
    return Joining(
        LoopProgram(sinks, [e for pair in ends for e in pair], program.time, part=program.part),
        tuple((*pair, s.linear) for s, pair in pairs), joined,
        {j: s.join() for s, j in zip(states, joins, strict=True)},
        {j: s.linear for s, j in zip(states, joins, strict=True)},
    )  # fmt: skip


@dataclass(frozen=True)
class _ChunkedState:
    """A state, its recurrence, and what is `kept` of its chunks, in temporaries from number `first` on.

    These have the axes in `order` beside that of the chunks.
    """

    table: TermTable
    state: LoopState
    linear: Linear
    axis: Axis
    order: Sequence[Axis]
    first: int
    kept: tuple[str, ...]

    @property
    def dtype(self) -> str:
        return WIDE.get(self.state.dtype, self.state.dtype)

    def memory(self, word: str) -> Temporary:
        """Where what is kept by this word is."""
        node, number = self.state.update.node, self.first + self.kept.index(word)
        axes = (*([] if word == "last" else [self.axis]), *self.order)
        return Temporary(number, f"{node.origin.name or 'state'}_{word}", self.dtype, axes, node)

    # ------------------------------------------------------------------ chunks
    def ends(self) -> tuple[LoopState, LoopState]:
        """The product of the factors of a chunk, from 1 on, and what it ends with, from 0 on."""
        time = next(a for a in self.state.update.axes if a.turn)
        factor, rest = (self._wide(t) for t in self.linear)
        found = []
        for at, (start, added) in enumerate(((1.0, self._number(0.0)), (0.0, rest))):
            number = 2 * self.state.number + at
            before, last = self._terms(number, (time, *self.state.axes))
            update = self._step(factor, before, added)
            found.append(self._state(number, self._number(start), update, before, last))
        return found[0], found[1]

    # ------------------------------------------------------------------ joined
    def join(self) -> Linear:
        """What a chunk makes of the state before it."""
        return Linear(self._load("factor"), self._load("end"))

    def joined(self) -> LoopState:
        before, last = self._terms(self.state.number, (self.axis, *self.state.axes))
        factor, rest = self.join()
        assert factor is not None and rest is not None
        update = self._step(factor, before, rest)
        initial = self.table.cast(self.state.initial.value, self.dtype)
        return self._state(self.state.number, initial, update, before, last, self.axis)

    def last(self) -> Term:
        """What it is in the end, from memory."""
        return self.table.cast(self._load("last"), self.state.dtype)

    def read_by_step(self) -> list[tuple[Term, tuple[Axis, ...]]]:
        """What is read where chunks are not joined, but walked step by step."""
        return [(t, self.state.update.axes) for t in self.linear if t is not None]

    # ------------------------------------------------------------------ again
    def begun(self) -> LoopState:
        """The state that begins each chunk with what was found."""
        start = self.table.cast(self._load("start"), self.state.dtype)
        return replace(self.state, initial=replace(self.state.initial, value=start))

    # ------------------------------------------------------------------ what is added up
    def from_zero(self) -> LoopState:
        """The state that adds up the steps of a chunk."""
        return replace(self.state, initial=replace(self.state.initial, value=self.table.const(0, self.state.dtype)))

    def total(self) -> Term:
        """What all chunks have added up, on top of what was there before the first step."""
        return self._on_top(self.state.initial.value, (self.axis,))

    def is_summed_by(self, term: Term) -> bool:
        """A sum over axes of what is added up."""
        initial = self.state.initial.value
        is_sum = term.op == "sum" and term.args == (self.state.last,)
        return is_sum and (is_zero(initial) or initial.axes.issuperset(term.param))

    def sum_of_total(self, term: Term) -> Term:
        """A sum of that over other axes: one over all of these and the chunks."""
        initial = self.state.initial.value
        start = initial if is_zero(initial) else self.table.again(term, (initial,))
        return self._on_top(start, (self.axis, *term.param))

    def _on_top(self, start: Term, axes: tuple[Axis, ...]) -> Term:
        load, node = self._load("total"), self.state.update.node
        total = self.table.make("sum", load, dtype=load.dtype, param=axes, node=node)
        return total if is_zero(start) else self.table.make("add", start, total, dtype=load.dtype, node=node)

    # ------------------------------------------------------------------ terms
    def buffers(self) -> list[Buffer]:
        """One for each word of what is kept."""
        return [self.memory(word).buffer for word in self.kept]

    def stored(self, word: str, value: Term) -> Sink:
        """What is kept of a chunk, or of all, to memory."""
        return self.memory(word).store(value, self.state.update.node)

    def _load(self, word: str) -> Term:
        return self.memory(word).load(self.table)

    def _wide(self, term: Term | None) -> Term:
        return self._number(0.0) if term is None else self.table.cast(term, self.dtype)

    def _number(self, value: float) -> Term:
        return self.table.const(value, self.dtype)

    def _step(self, factor: Term, before: Term, added: Term) -> Term:
        scaled = self.table.make("mul", factor, before, dtype=self.dtype)
        return self.table.make("add", scaled, added, dtype=self.dtype)

    def _terms(self, number: int, axes: tuple[Axis, ...]) -> tuple[Term, Term]:
        before = self.table.make("carried", dtype=self.dtype, param=Carried(number, axes))
        return before, self.table.make("last", dtype=self.dtype, param=Carried(number, axes[1:]))

    def _state(
        self, number: int, initial: Term, update: Term, before: Term, last: Term, time: Axis | None = None
    ) -> LoopState:  # fmt: skip
        state = self.state
        axes = state.update.axes if time is None else (time, *state.axes)
        return LoopState(
            number, state.axes, self.dtype, replace(state.initial, value=initial, dtype=self.dtype),
            replace(state.update, value=update, axes=axes, dtype=self.dtype), before, last,
        )  # fmt: skip


def tile_of_chunks(tile: LoopTile, axis: Axis) -> LoopTile:
    """The tile of steps, for each chunk."""
    return tile._replace(grid=(axis, *tile.grid))


def tile_of_joined(tile: LoopTile, time: Axis, axis: Axis) -> LoopTile:
    """All chunks as one tile."""
    lanes = {a: n for a, n in tile.blocks.items() if a is not time}
    return tile._replace(blocks={axis: int(axis.size), **lanes})
