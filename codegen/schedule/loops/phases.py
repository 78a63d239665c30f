"""Time in chunks, where a linear recurrence has few elements and many steps: three kernels instead of one.

    chunks   program (chunk, block):   p[chunk], e[chunk]   the product of factors, and the end of what begins with zero
    joined   over the chunks at once:  h = p[chunk] * h + e[chunk], and h before each chunk to memory
    again    program (chunk, block):   the steps of a chunk, from its own h

What is read twice is what factors and rests are made of; p, e and h are as many elements as there are chunks of states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import sympy

from ....ir.switches import is_on
from ....ir.types import Size, contiguous_strides, product
from ...kernel import WORTH, Buffer, Ref
from ...program.axes import Access, Axis, Index, Sink, Term, terms_below
from ...program.sizes import cdiv, evaluate_size, whole_times
from ...program.terms import TermTable
from ..workload import Workload
from .recurrences import Linear
from .roles import Carried, LoopProgram, LoopState
from .tiles import LoopTile

MOST = 64
"""Chunks, at most: they are joined as one tile of steps is scanned."""
LEAST = 4
"""Tiles of steps of a chunk, at least: with fewer, two more launches take longer than what they save (`Estimate`)."""
TURN, LAUNCH = 1.0, 3.0
"""Microseconds that a tile of steps is taken to need, a load and a scan that wait for one another; and a launch."""
LARGEST: Final = {"bf16": 2.0**62, "f32": 2.0**62, "f64": 2.0**510}
"""Below it, factor * state + rest is finite whatever is between: beyond, time is walked step by step."""
WIDE: Final = {"bf16": "f32"}
"""The dtype of what is found of a chunk, where it is not that of the state."""


class Estimate(NamedTuple):
    """Microseconds of one launch and of three, where the device has room for all chunks at once."""

    whole: float
    in_chunks: float

    @staticmethod
    def of(turns: int, chunks: int) -> Estimate:
        walked = -(-turns // chunks)
        return Estimate(turns * TURN + LAUNCH, (2 * walked + 1) * TURN + 3 * LAUNCH)


def wanted_chunks(w: Workload, program: LoopProgram, tile: LoopTile, linear: dict[LoopState, Linear]) -> Size:
    """How many chunks would give each multiprocessor two programs, as far as time is long enough; one at least."""
    if not is_on("chunks_of_time") or why_whole(linear):
        return 1
    programs = programs_of(tile)
    busy = max(1, programs) if isinstance(programs, int) else sympy.Max(1, programs)
    by_device = whole_times(2 * w.target.units, busy)
    by_length = whole_times(cdiv(program.time.size, tile.blocks[program.time]), LEAST)
    if all(isinstance(n, int) for n in (by_device, by_length)):
        return min(MOST, by_device, by_length)
    return sympy.Min(MOST, by_device, by_length)


def programs_of(tile: LoopTile) -> Size:
    """The programs that there are for one chunk."""
    return product(cdiv(a.size, tile.blocks.get(a, 1)) for a in tile.grid)


def why_whole(linear: dict[LoopState, Linear]) -> str:
    """Why these recurrences are not taken in chunks of time; nothing where they may be."""
    if any(s.dtype not in LARGEST for s in linear):
        return "float16 overflows within a chunk"
    parts = [t for pair in linear.values() for t in pair if t is not None]
    return "what is carried is read by what else is carried" * any(t.op == "carried" for t in terms_below(parts))


def chunks_at(wanted: Size, w: Workload) -> int:
    """A power of two of chunks; 1 leaves time whole."""
    count = evaluate_size(wanted, w.hints)
    return 1 if count < WORTH else 1 << count.bit_length() - 1


@dataclass(frozen=True)
class Phases:
    """The programs of the three kernels, over the axis of the chunks. `again`: none where no step is stored."""

    axis: Axis
    chunks: LoopProgram
    ends: tuple[tuple[LoopState, LoopState, Linear], ...]
    """Of each state the product of its factors, what it is in the end, and its recurrence."""
    joined: LoopProgram
    joins: dict[LoopState, Linear]
    steps: dict[LoopState, Linear]
    """The recurrence of the steps below each that joins chunks."""
    again: LoopProgram | None
    linear: dict[LoopState, Linear]
    buffers: tuple[Buffer, ...]


def phases_of(
    table: TermTable, program: LoopProgram, linear: dict[LoopState, Linear], order: Sequence[Axis], chunks: int,
    first: int,
) -> Phases:  # fmt: skip
    """Time in so many chunks; `first`: the number of the first temporary that holds what is found of them."""
    axis = table.axes.axis(("chunk",), chunks)
    states = [_ChunkedState(table, s, pair, axis, order, first + 3 * at) for at, (s, pair) in enumerate(linear.items())]
    ends = [s.ends() for s in states]
    sinks = [sink for s, pair in zip(states, ends, strict=True) for sink in s.stored(*pair)]
    pairs = tuple((*pair, s.linear) for s, pair in zip(states, ends, strict=True))
    is_needed = bool(program.in_loop)
    joins = [s.joined() for s in states]
    lasts = {s.state.last: table.cast(j.last, s.state.dtype) for s, j in zip(states, joins, strict=True)}
    after = [sink.of_terms(table.replaced(sink.terms, lasts)) for sink in program.after]
    starts = [s.start(j) for s, j in zip(states, joins, strict=True)] if is_needed else []
    beside = [replace(s.state.update, value=t, axes=t_axes) for s in states for t, t_axes in s.read_by_step()]
    joined = LoopProgram([*starts, *after], joins, axis, beside)
    begun = [s.begun() for s in states]
    again = LoopProgram(program.in_loop, begun, program.time) if is_needed else None
    return Phases(
        axis, LoopProgram(sinks, [e for pair in ends for e in pair], program.time), pairs, joined,
        {j: s.join() for s, j in zip(states, joins, strict=True)},
        {j: s.linear for s, j in zip(states, joins, strict=True)}, again,
        {b: s.linear for s, b in zip(states, begun, strict=True)},
        tuple(b for s in states for b in s.buffers()[: 3 if is_needed else 2]),
    )  # fmt: skip


@dataclass(frozen=True)
class _ChunkedState:
    """A state, its recurrence, and the temporaries of its chunks from number `first` on."""

    table: TermTable
    state: LoopState
    linear: Linear
    axis: Axis
    order: Sequence[Axis]
    first: int

    @property
    def dtype(self) -> str:
        return WIDE.get(self.state.dtype, self.state.dtype)

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (self.axis, *(a for a in self.order if a in self.state.axes))

    @property
    def place(self) -> Index:
        index = [Index() if a.size == 1 else Index.over(a) for a in self.axes]
        return Index.linear(index, contiguous_strides(tuple(a.size for a in self.axes)))

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

    def stored(self, product: LoopState, end: LoopState) -> list[Sink]:
        return [self._sink(at, state.last) for at, state in enumerate((product, end))]

    # ------------------------------------------------------------------ joined
    def join(self) -> Linear:
        """What a chunk makes of the state before it."""
        return Linear(self._load(0), self._load(1))

    def joined(self) -> LoopState:
        before, last = self._terms(self.state.number, (self.axis, *self.state.axes))
        factor, rest = self.join()
        assert factor is not None and rest is not None
        update = self._step(factor, before, rest)
        initial = self.table.cast(self.state.initial.value, self.dtype)
        return self._state(self.state.number, initial, update, before, last, self.axis)

    def start(self, joined: LoopState) -> Sink:
        """The state before each chunk, to memory."""
        return self._sink(2, joined.before)

    def read_by_step(self) -> list[tuple[Term, tuple[Axis, ...]]]:
        """What is read where chunks are not joined, but walked step by step."""
        return [(t, self.state.update.axes) for t in self.linear if t is not None]

    # ------------------------------------------------------------------ again
    def begun(self) -> LoopState:
        """The state that begins each chunk with what was found."""
        start = self.table.cast(self._load(2), self.state.dtype)
        return replace(self.state, initial=replace(self.state.initial, value=start))

    # ------------------------------------------------------------------ terms
    def buffers(self) -> list[Buffer]:
        shape = tuple(a.size for a in self.axes)
        words = ("factor", "end", "start")
        stem = self.state.update.node.origin.name or "state"
        return [
            Buffer(f"{stem}_{word}_{self.first + at}", self.dtype, shape, contiguous_strides(shape))
            for at, word in enumerate(words)
        ]

    def _sink(self, at: int, value: Term) -> Sink:
        node = self.state.update.node
        return Sink(Ref("temporary", self.first + at), value, self.place, self.axes, self.dtype, "store", node)

    def _load(self, at: int) -> Term:
        access = Access(Ref("temporary", self.first + at), self.place)
        return self.table.make("load", dtype=self.dtype, param=access, node=self.state.update.node)

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
