"""Two loops in one kernel: one through time, and another one behind it, over the same lanes.

What the first hands to the second is read by the program that stored it. Where that moves fewer bytes, it is made again
in blocks of steps, and not kept of all:

    there   for each block:                   h to memory;    for t in block:  h = f(h)
    back    for each block, the last first:   h from memory;  for t in block:  z[t - first] = g(h);  h = f(h)
            then, the other way,              for t in block:  .. z[t - first] ..
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ....ir.switches import is_on
from ....ir.types import ITEMSIZE, Size, product
from ...kernel import Buffer, Ref, Target
from ...program.axes import Axis, Index, Sink, Term, terms_below
from ...program.sizes import Hints, cdiv, divide, evaluate_size, nonnegative, same, tidy
from ...program.terms import Temporary, TermTable
from ..workload import Workload
from .roles import LoopProgram, LoopState
from .tiles import LoopTile, halves, tile_of

LONGEST, SHORTEST = 64, 4
"""Steps of a block: more take no fewer bytes worth having, fewer wait for memory in each of them."""
FURTHEST = 2
"""Steps that may be made again behind those of a block."""
LEAST_BLOCKS = 4
"""Of which there are so many at least."""
WORKSPACE, NEARBY = 8, 4
"""What a kernel has read or written is in L2 still where it fills at most one part in so many of it; and what it has
within a block of steps."""


class Again(LoopProgram):
    """The steps that make again what is handed over: their states begin with what was kept of them before a block."""

    @property
    def in_loop(self) -> list[Sink]:
        """All that they store is at a place within the block."""
        return list(self.sinks)


@dataclass(frozen=True)
class Blocks:
    """Blocks of `steps`, by number along `axis`; a step is at a place along `slot` within its own.

    kept: what is stored of states before a block. further: steps that are made again behind a block. shapes: of what is
    handed over, which has the steps of one block.
    """

    steps: int
    further: int
    axis: Axis
    slot: Axis
    kept: tuple[Sink, ...]
    again: Again
    buffers: tuple[Buffer, ...]
    shapes: Mapping[Ref, tuple[Size, ...]]


class RoundTrip(LoopProgram):
    """The program of both loops. cached: loads that find in L2 what the kernel has read or written before."""

    def __init__(
        self, first: LoopProgram, second: LoopProgram, blocks: Blocks | None = None, cached: Collection[Term] = ()
    ) -> None:
        loops = [first, second, *([blocks.again] if blocks else [])]
        sinks = [*(s for loop in loops for s in loop.sinks), *(blocks.kept if blocks else ())]
        super().__init__(sinks, [s for loop in loops for s in loop.states], second.time, part=second.part)
        self.first, self.second, self.blocks, self.cached = first, second, blocks, frozenset(cached)

    @property
    def walks(self) -> tuple[LoopProgram, ...]:
        return self.first, self.second

    @property
    def beside(self) -> tuple[Axis, ...]:
        return () if self.blocks is None else (self.blocks.axis, self.blocks.slot)

    @cached_property
    def whole_in_steps(self) -> frozenset[Axis]:
        return self.first.whole_in_steps | self.second.whole_in_steps


# ---------------------------------------------------------------------- which loops
def go_together(first: LoopProgram, second: LoopProgram) -> bool:
    """Each place of the grid is the same in both, and what is handed over is read by the program that stored it."""
    if first.products or second.products or first.part is not None or not is_on("round_trips"):
        return False
    whole = first.whole | second.whole
    grids = [_lanes(p) - whole for p in (first, second)]
    divided = {second.part.of, second.part.axis} if second.part is not None else set()
    is_alike = grids[0] == grids[1] - (divided - grids[0]) and not divided & first.whole
    return is_alike and _stays_in_programs(first, second)


def _lanes(program: LoopProgram) -> set[Axis]:
    return {a for a in program.axes if not a.turn}


def _stays_in_programs(first: LoopProgram, second: LoopProgram) -> bool:
    """Every place that the second reads of what the first stores is one that the same program has stored."""
    stored: dict[Ref, list[Index]] = {}
    for sink in first.sinks:
        stored.setdefault(sink.ref, []).append(sink.place)
    loads = [t for t in second.terms if t.op == "load" and t.param.ref in stored]
    known = (not t.param.indirect and all(_has_lanes_of(t.param.place, p) for p in stored[t.param.ref]) for t in loads)
    return all(known) and {t.param.ref for t in loads}.isdisjoint(s.ref for s in second.sinks)


def _has_lanes_of(place: Index, stored: Index) -> bool:
    """It is at the same place along all axes but that of the steps, whichever of these it is at."""
    by_step = [c for a, c in stored.terms if a.turn]
    moved = [*(c for a, c in place.terms if a.turn), tidy(place.offset - stored.offset)]
    lanes = [[t for t in p.terms if not t[0].turn] for p in (place, stored)]
    is_step = all(n == 0 or any(divide(n, c) is not None for c in by_step) for n in moved)
    return lanes[0] == lanes[1] and is_step and not stored.values


# ---------------------------------------------------------------------- what is made again
@dataclass(frozen=True)
class Planning:
    """Two loops at the current sizes. private: memory that no other kernel reads."""

    table: TermTable
    first: LoopProgram
    second: LoopProgram
    private: frozenset[Ref]
    target: Target
    hints: Hints

    @cached_property
    def lanes(self) -> RoundTrip:
        """Both loops, whatever is made again."""
        return RoundTrip(self.first, self.second)

    @cached_property
    def w(self) -> Workload:
        return Workload(self.lanes, self.target, self.hints)

    @cached_property
    def tile(self) -> LoopTile:
        return tile_of(self.w, self.lanes, self.hints)

    @cached_property
    def steps(self) -> int:
        return evaluate_size(self.first.time.size, self.hints)

    # ------------------------------------------------------------------ what is handed over
    @cached_property
    def handed(self) -> dict[Ref, Sink]:
        """What the second reads of each step of the first, in that step or a few before, and nothing else does."""
        if self.first.time.turn == self.second.time.turn:
            return {}
        stored = {s.ref: s for s in self.first.sinks if s.ref in self.private}
        return {ref: s for ref, s in stored.items() if self._is_handed(ref, s)}

    def _is_handed(self, ref: Ref, sink: Sink) -> bool:
        loads = self._loads_of(ref)
        alone = sum(s.ref == ref for s in self.first.sinks) == 1 and not sink.within and not sink.place.values
        read_first = any(t.op == "load" and t.param.ref == ref for t in self.first.terms)
        is_near = all(self._may_be_further(self._further(t, sink)) and not t.args for t in loads)
        return alone and self._is_by_step(sink) and is_near and bool(loads) and not read_first

    def _loads_of(self, ref: Ref) -> list[Term]:
        return [t for t in self.second.terms if t.op == "load" and t.param.ref == ref]

    def _further(self, load: Term, sink: Sink) -> Size | None:
        """How many steps further a step of the second reads what the first stores; None where it is elsewhere."""
        place, by_step = self._in_first(load), dict(sink.place.terms).get(self.first.time)
        off = tidy(place.offset - sink.place.offset)
        is_same = by_step is not None and replace(place, offset=sink.place.offset) == sink.place
        return divide(off, by_step) if is_same and by_step is not None else None

    def _may_be_further(self, steps: Size | None) -> bool:
        """The first has a step for each; behind a block, a few more are made again."""
        lengths = tidy(self.first.time.size - self.second.time.size)
        if self.first.time.turn == "backward":
            return steps == 0 and lengths == 0
        return isinstance(steps, int) and 0 <= steps <= FURTHEST and nonnegative(tidy(lengths - steps))

    @cached_property
    def further(self) -> int:
        """The steps that are made again behind a block."""
        found = [self._further(t, s) for ref, s in self.handed.items() for t in self._loads_of(ref)]
        return max((n for n in found if isinstance(n, int)), default=0)

    def _is_by_step(self, sink: Sink) -> bool:
        """Its steps come first in memory."""
        own = dict(sink.place.terms).get(self.first.time)
        return own is not None and same(own, product(sink.node.shape[1:]))

    def _in_first(self, load: Term) -> Index:
        """The place of a load, by the steps of the first loop."""
        return load.param.place.renamed({self.second.time: Index.over(self.first.time)})  # type: ignore[no-any-return]

    @cached_property
    def states(self) -> list[LoopState]:
        """Those that what is handed over is made of, or that these are made of."""
        found: dict[LoopState, None] = {}
        todo = [s.value for s in self.handed.values()]
        while todo:
            read = terms_below([todo.pop()])
            new = [s for s in self.first.states if s.before in read and s not in found]
            found |= dict.fromkeys(new)
            todo += [s.update.value for s in new]
        return [s for s in self.first.states if s in found]

    # ------------------------------------------------------------------ bytes
    def bytes_of(self, terms: Iterable[Term]) -> int:
        """Of the loads of one step."""
        loads = {t.param: t for t in terms_below(terms) if t.op == "load" and any(a.turn for a in t.axes)}
        return sum(ITEMSIZE[t.dtype] * self._in_step(t.axes) for t in loads.values())

    def _in_step(self, axes: Iterable[Axis]) -> int:
        return math.prod(self.w.size[a] for a in axes if not a.turn)

    @cached_property
    def handed_bytes(self) -> int:
        """Of one step."""
        return sum(ITEMSIZE[s.dtype] * self._in_step(s.axes) for s in self.handed.values())

    @cached_property
    def kept_bytes(self) -> int:
        return sum(ITEMSIZE[s.dtype] * self._in_step(s.axes) for s in self.states)

    @cached_property
    def made_of(self) -> list[Term]:
        """The loads of each step by which what is handed over is made again."""
        values = [*(s.value for s in self.handed.values()), *(s.update.value for s in self.states)]
        return [t for t in terms_below(values) if t.op == "load" and self.first.time in t.axes]

    @cached_property
    def read_alone(self) -> list[Term]:
        """Those of them that the second does not read anyway."""
        places = {(t.param.ref, self._in_first(t)) for t in self.second.terms if t.op == "load"}
        return [t for t in self.made_of if (t.param.ref, t.param.place) not in places]

    @cached_property
    def footprint(self) -> int:
        """Bytes that the first loop reads and stores."""
        return sum(t.itemsize * self.w.elements(t.axes) for t in self.first.traffic())

    @property
    def room(self) -> int:
        return self.target.l2 // WORKSPACE

    def block(self) -> int | None:
        """Steps of a block: as many as L2 has room for; None where what is handed over is no more than these keep."""
        programs = math.prod(-(-self.w.size[a] // self.tile.blocks.get(a, 1)) for a in self.tile.grid)
        running = min(1.0, self.target.units / max(1, programs))
        hot = running * (self.handed_bytes + self.bytes_of(self.made_of))
        possible = [n for n in halves(LONGEST) if n >= SHORTEST and n * LEAST_BLOCKS <= self.steps]
        fitting = (n for n in possible if n * hot <= self.target.l2 // NEARBY and self._saves(n))
        return next(fitting, None) if self.handed else None

    def _saves(self, steps: int) -> bool:
        """In a step fewer bytes are moved by what is kept, and read again, than by what is handed over."""
        again = 2 * self.kept_bytes / steps + self.bytes_of(self.read_alone) * (1 + self.further / steps)
        return again + self.handed_bytes * steps / self.steps < 2 * self.handed_bytes

    # ------------------------------------------------------------------ the program
    def trip(self, number: int) -> RoundTrip:
        """Both loops; `number`: of the first temporary that holds states before blocks."""
        steps = self.block() if is_on("blocks_of_steps") else None
        if steps is None:
            return RoundTrip(self.first, self.second, cached=self._found_in_cache(self.second))
        slot = self.table.axes.axis(("slot", self.first.time), steps + self.further)
        axis = self.table.axes.axis(("block", self.first.time), cdiv(self.first.time.size, steps))
        kept = [_Kept(s, axis, number + at, self.w.order) for at, s in enumerate(self.states)]
        blocks = Blocks(
            steps, self.further, axis, slot, tuple(k.store() for k in kept), self._again(kept, slot),
            tuple(k.memory.buffer for k in kept),
            {ref: (steps + self.further, *s.node.shape[1:]) for ref, s in self.handed.items()},
        )  # fmt: skip
        rest = [s for s in self.first.sinks if s.ref not in self.handed]
        first = LoopProgram(rest, self.first.states, self.first.time)
        second = self._reading(slot)
        slots = [t for t in second.terms if t.op == "load" and slot in t.axes]
        loads = [s.initial.value for s in blocks.again.states] if self.footprint <= self.room else []
        return RoundTrip(first, second, blocks, [*slots, *loads, *self._found_in_cache(second)])

    def _again(self, kept: Sequence[_Kept], slot: Axis) -> Again:
        states = [k.begun(self.table) for k in kept]
        return Again([_at_slot(s, self.first.time, slot) for s in self.handed.values()], states, self.first.time)

    def _reading(self, slot: Axis) -> LoopProgram:
        """The second loop, which reads what is handed over within a block."""
        second, table = self.second, self.table
        to = {second.time: Index.over(slot)}
        loads = (t for t in second.terms if t.op == "load" and t.param.ref in self.handed)
        new = table.replaced(
            [*second.terms, *(t for s in second.states for t in (*s.update.terms, *s.initial.terms))],
            {t: table.moved(t, to) for t in loads},
        )
        states = [replace(s, initial=s.initial.of_terms(new), update=s.update.of_terms(new)) for s in second.states]
        return LoopProgram([s.of_terms(new) for s in second.sinks], states, second.time, part=second.part)

    def _found_in_cache(self, second: LoopProgram) -> list[Term]:
        if self.footprint > self.room:
            return []
        known, own = {(t.ref, t.place) for t in self.first.traffic()}, set(self.first.terms)
        loads = (t for t in second.terms if t.op == "load" and t not in own)
        return [t for t in loads if (t.param.ref, self._in_first(t)) in known]

    def read_again(self, trip: RoundTrip) -> list[Term]:
        """The loads of the first loop that are read from memory once more, and that the second does not repeat."""
        is_far = trip.blocks is not None and self.footprint > self.room
        return [t for t in self.read_alone if t in trip.first.terms] if is_far else []


def _at_slot(sink: Sink, time: Axis, slot: Axis) -> Sink:
    axes = tuple(slot if a is time else a for a in sink.axes)
    return replace(sink, place=sink.place.renamed({time: Index.over(slot)}), axes=axes)


@dataclass(frozen=True)
class _Kept:
    """A state before each block, in memory."""

    state: LoopState
    axis: Axis
    number: int
    order: Sequence[Axis]

    @property
    def memory(self) -> Temporary:
        node = self.state.update.node
        own = (a for a in self.order if a in self.state.axes)
        return Temporary(self.number, f"{node.origin.name or 'state'}_kept", self.state.dtype, (self.axis, *own), node)

    def store(self) -> Sink:
        return self.memory.store(self.state.before, self.state.update.node)

    def begun(self, table: TermTable) -> LoopState:
        """The state that begins with it."""
        return replace(self.state, initial=replace(self.state.initial, value=self.memory.load(table)))

