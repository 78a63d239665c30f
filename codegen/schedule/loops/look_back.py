"""Time in chunks, where a linear recurrence has few elements and many steps: the programs of the chunks look back.

    program (chunk, block):   p[chunk], e[chunk]   the product of factors, and the end of what begins with zero
                              h = p[k] * h + e[k]  for each k before the chunk, once the programs of these have told it
                              the steps of the chunk, from h on

One launch. What factors and rests are made of is read twice, the second time out of the cache where that holds it; p
and e are as many elements as there are chunks of states. Chunks are numbered as time goes, so that a program waits for
those with smaller numbers alone. (Merrill, Garland: Single-pass Parallel Prefix Scan with Decoupled Look-back, 2016.)
What steps only add up begins with zero in every chunk; a kernel behind this one adds up what the chunks have.
"""

from __future__ import annotations

import math
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
from .tiles import LoopTile, steps_of_a_turn

MOST = 64
"""Chunks, at most: what those before one have found is scanned as one tile."""
SCANNED = 8192
"""Elements of that tile, at most: each thread holds its part of all of them beside what a step needs."""
LEAST = 2
"""Tiles of steps of a chunk, at least: with fewer, looking back takes longer than what it saves (`Estimate`)."""
LEAST_OF_TWO = 11
"""Tiles of steps beside the number of chunks, at least, where a second launch adds up what these have."""
TURN, LAUNCH, LOOK = 1.0, 3.0, 3.0
"""Microseconds that a tile of steps is taken to need, a load and a scan that wait for one another; a launch; and to
wait for the chunks before one, to read what they have found and to scan it."""
LARGEST: Final = {"bf16": 2.0**62, "f32": 2.0**62, "f64": 2.0**510}
"""Below it, factor * state + rest is finite whatever is between: beyond, time is walked from the first step on."""
WIDE: Final = {"bf16": "f32"}
"""The dtype of what is found of a chunk, where it is not that of the state."""


class Estimate(NamedTuple):
    """Microseconds of all time as one, and of chunks, where the device has room for all of them at once."""

    whole: float
    in_chunks: float

    @staticmethod
    def of(turns: int, chunks: int, launches: int, passes: int) -> Estimate:
        """The turns of a chunk are taken twice, but once by what adds up alone, which looks at no other."""
        walked = passes * -(-turns // chunks) * TURN
        return Estimate(turns * TURN + LAUNCH, walked + (passes - 1) * LOOK + launches * LAUNCH)


def wanted_chunks(w: Workload, program: LoopProgram, tile: LoopTile, states: Iterable[LoopState]) -> Size:
    """How many chunks would give each multiprocessor two programs, as far as time is long enough; one at least."""
    if not is_on("chunks_of_time"):
        return 1
    programs = programs_of(tile)
    busy = max(1, programs) if isinstance(programs, int) else sympy.Max(1, programs)
    by_device = whole_times(2 * w.target.units, busy)
    kinds = {added_to(program, s) is None for s in states}
    turns = cdiv(program.time.size, steps_of_a_turn(w, program, tile))
    by_length = [whole_times(turns, LEAST), *([whole_times(turns - LEAST_OF_TWO, 1)] if len(kinds) == 2 else [])]
    lanes = math.prod(n for axis, n in tile.blocks.items() if axis is not program.time)
    most = max(1, min(MOST, SCANNED // lanes))
    if all(isinstance(n, int) for n in (by_device, *by_length)):
        return min(most, by_device, *by_length)
    return sympy.Min(most, by_device, *by_length)


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


class Found(NamedTuple):
    """What is found of each chunk of a state: the product of its factors, and what it is in the end from 0 on."""

    state: LoopState
    linear: Linear
    product: LoopState
    end: LoopState


class LookBack(LoopProgram):
    """The program of a kernel whose chunks are along `axis`; those before one are along `before`.

    found: of what is carried beside what is added up. steps: the steps of a chunk, whose totals begin with zero.
    ends: what is stored of what is carried to the end, by the last chunk.
    """

    def __init__(
        self, axis: Axis, before: Axis, found: Sequence[Found], steps: LoopProgram, linear: dict[LoopState, Linear],
        ends: Sequence[Sink],
    ) -> None:  # fmt: skip
        states = [*(s for f in found for s in (f.product, f.end)), *steps.states]
        super().__init__([*steps.sinks, *ends], states, steps.time, part=steps.part)
        self.axis, self.before, self.found, self.steps = axis, before, tuple(found), steps
        self.linear, self.ends = linear, tuple(ends)
        self.axes = tuple(sorted({*self.axes, axis}, key=lambda a: a.order))

    @property
    def walks(self) -> tuple[LoopProgram, ...]:
        return (self.steps,)

    @property
    def beside(self) -> tuple[Axis, ...]:
        return (self.before,)

    @property
    def read_twice(self) -> list[Term]:
        """The loads of steps that are read to find what a chunk makes of the state, and again."""
        below = terms_below(t for f in self.found for t in f.linear if t is not None)
        return [t for t in below if t.op == "load" and self.time in t.axes]


class Chunked(NamedTuple):
    """The program in chunks, the stores of what these have added up, and the memory in which they have."""

    program: LookBack
    merged: tuple[Sink, ...]
    buffers: tuple[Buffer, ...]


def in_chunks_of(
    table: TermTable, program: LoopProgram, linear: dict[LoopState, Linear], order: Sequence[Axis], chunks: int,
    first: int,
) -> Chunked:  # fmt: skip
    """Time in so many chunks; `first`: the number of the first temporary that holds what is found of them."""
    axis, before = (table.axes.axis((word,), chunks) for word in ("chunk", "before"))
    late = late_stores(program)
    read = terms_below(t for s in late for t in s.terms)
    kept: dict[LoopState, _Kept] = {}
    for state in linear:
        is_total = added_to(program, state) is not None
        if is_total or state.last in read:
            own = (*state.axes, *_parts_below(program, state))
            axes = (*((axis,) if is_total else ()), *(a for a in order if a in own))
            kept[state] = _Kept(table, state, axes, first + len(kept), is_total)
    totals = {s: k for s, k in kept.items() if k.is_total}
    found = [_found(table, program, s, pair) for s, pair in linear.items() if s not in totals]
    begun = {(totals[s].from_zero() if s in totals else s): pair for s, pair in linear.items()}
    stores = [*program.in_loop, *(k.stored() for k in totals.values())]
    steps = LoopProgram(stores, list(begun), program.time, part=program.part)
    ends = [*(s for s in program.after if s not in late), *(k.stored() for k in kept.values() if not k.is_total)]
    known = {s.last: k.loaded() for s, k in kept.items()}
    known |= {t: k.sum_of_total(t) for k in totals.values() for t in read if k.is_summed_by(t)}
    new = table.replaced([s.value for s in late], known)
    merged = tuple(s.of_terms({**{t: t for t in s.terms}, **new}) for s in late)
    return Chunked(
        LookBack(axis, before, found, steps, begun, ends), merged, tuple(k.memory.buffer for k in kept.values())
    )


def late_stores(program: LoopProgram) -> list[Sink]:
    """The stores that wait for what all chunks have added up."""
    totals = {s.last for s in program.states if added_to(program, s) is not None}
    return [s for s in program.after if totals.intersection(terms_below(s.terms))]


def _parts_below(program: LoopProgram, state: LoopState) -> list[Axis]:
    """The axis of parts, where a state adds up what each program sums of a step."""
    part = program.part
    if part is None:
        return []
    summed = {a for t in terms_below([state.update.value]) if t.op == "sum" for a in t.param}
    return [part.axis] if part.of in summed else []


def _found(table: TermTable, program: LoopProgram, state: LoopState, linear: Linear) -> Found:
    """The product of the factors of a chunk, from 1 on, and what it ends with, from 0 on."""
    dtype = WIDE.get(state.dtype, state.dtype)
    factor, rest = (table.const(0.0, dtype) if t is None else table.cast(t, dtype) for t in linear)
    states, numbers = [], max(s.number for s in program.states) + 1
    for at, (start, added) in enumerate(((1.0, table.const(0.0, dtype)), (0.0, rest))):
        number = numbers + 2 * state.number + at
        before = table.make("carried", dtype=dtype, param=Carried(number, (program.time, *state.axes)))
        scaled = table.make("mul", factor, before, dtype=dtype)
        after = table.make("add", scaled, added, dtype=dtype)
        initial = replace(state.initial, value=table.const(start, dtype), dtype=dtype)
        update = replace(state.update, value=after, dtype=dtype)
        last = table.make("last", dtype=dtype, param=Carried(number, state.axes))
        states.append(LoopState(number, state.axes, dtype, initial, update, before, last))
    return Found(state, linear, *states)


@dataclass(frozen=True)
class _Kept:
    """What is kept of a state for the kernel behind: what each chunk has added up, or what it is in the end."""

    table: TermTable
    state: LoopState
    axes: tuple[Axis, ...]
    number: int
    is_total: bool

    @property
    def memory(self) -> Temporary:
        node, word = self.state.update.node, "total" if self.is_total else "last"
        dtype = WIDE.get(self.state.dtype, self.state.dtype)
        return Temporary(self.number, f"{node.origin.name or 'state'}_{word}", dtype, self.axes, node)

    def from_zero(self) -> LoopState:
        """The state that adds up the steps of a chunk."""
        zero = self.table.const(0, self.state.dtype)
        return replace(self.state, initial=replace(self.state.initial, value=zero))

    def stored(self) -> Sink:
        """What a chunk has added up, or what all end with, to memory."""
        return self.memory.store(self.table.cast(self.state.last, self.memory.dtype), self.state.update.node)

    def loaded(self) -> Term:
        """What it is in the end; of what is added up, on top of what was there before the first step."""
        if not self.is_total:
            return self.table.cast(self.memory.load(self.table), self.state.dtype)
        return self._on_top(self.state.initial.value, self.axes[:1])

    def is_summed_by(self, term: Term) -> bool:
        """A sum over axes of what is added up."""
        initial = self.state.initial.value
        is_sum = term.op == "sum" and term.args == (self.state.last,)
        return is_sum and (is_zero(initial) or initial.axes.issuperset(term.param))

    def sum_of_total(self, term: Term) -> Term:
        """A sum of that over other axes: one over all of these and the chunks."""
        initial = self.state.initial.value
        start = initial if is_zero(initial) else self.table.again(term, (initial,))
        return self._on_top(start, (*self.axes[:1], *term.param))

    def _on_top(self, start: Term, axes: tuple[Axis, ...]) -> Term:
        load, node = self.memory.load(self.table), self.state.update.node
        total = self.table.make("sum", load, dtype=load.dtype, param=axes, node=node)
        return total if is_zero(start) else self.table.make("add", start, total, dtype=load.dtype, node=node)


def tile_of_chunks(tile: LoopTile, axis: Axis) -> LoopTile:
    """The tile of steps, for each chunk."""
    return tile._replace(grid=(axis, *tile.grid))
