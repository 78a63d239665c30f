"""Time in chunks: what each makes of the state before it, told to those behind it; what is before it; its steps.

    for item in tl.range(chunk * ITEMS, tl.minimum((chunk + 1) * ITEMS, tl.cdiv(T, BLOCK_T))):
        factor, end = ..
    tl.store(factor_ptr + pid * .., factor)
    tell(told_ptr + ..)
    in_vain(told_ptr + .. + before, mask=before < chunk)
    h = the last row of what is scanned of those before
    for item in tl.range(..):
        .. as if time were one

Where one of them is not told in time, or is no number, time is walked from its first step on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

from ....ir.types import Size, product
from ...program.sizes import cdiv, tidy
from ...schedule.loops.look_back import Found, LookBack
from ...schedule.loops.roles import LoopProgram, LoopState
from ..emit import Emitter
from ..mathematics import TL
from ..statements import (
    Accumulate,
    Expr,
    If,
    Scope,
    Statement,
    Store,
    Tell,
    add,
    binary,
    call,
    literal,
    name,
    sum_of,
    total,
)
from .chunks import ChunkedLoop, magnitude, reduced_along
from .parts_of_time import ChunkEnds, PartOfTime, Turns, largest

PATIENCE = 1 << 20
"""Times that a program asks for what others tell: about a second, where they do not run at all."""


class LookBackLoops:
    """A kernel of chunks of time under construction. `block`: steps of a tile."""

    def __init__(self, emitter: Emitter, look: LookBack, block: int) -> None:
        self.emitter, self.look, self.context, self.block = emitter, look, emitter.context, block
        self.grid = [a for a in self.context.plan.grid if a is not look.axis]
        self.count = int(look.axis.size)

    def emit(self) -> None:
        """All of the kernel."""
        look = self.look
        ChunkedLoop(self.emitter, look, {}).set_coordinates()
        turns = Turns(self.context, look, self.chunk, self.block)
        steps = PartOfTime(self.emitter, look.steps, look.linear, turns, self._first_asked(turns), turns.stop)
        back = self._back(turns) if look.found else None
        steps.begin()
        if back is not None:
            back.look(steps, turns)
        steps.emit()
        steps.finish()
        self._finish(steps)
        if back is not None:
            back.words.clear()

    def _first_asked(self, turns: Turns) -> Expr:
        """The first of the tiles whose steps are asked for: where none is stored, those of the last chunk alone."""
        if self.look.steps.sinks:
            return turns.first
        first = call("tl.where", self.is_last(), turns.first, turns.stop)
        return self.context.top.define(self.context.names.fresh("first"), first)

    def _back(self, turns: Turns) -> Back:
        """What the chunk makes of the states before it is found, and told."""
        ends = ChunkEnds(self.emitter, self.look, turns)
        ends.begin()
        ends.emit()
        ends.finish()
        return Back(self, ends)

    @cached_property
    def chunk(self) -> Expr:
        """The number of this program's chunk, of 32 bits."""
        base = self.emitter.coords[self.look.axis].base
        assert base is not None
        return self.context.top.define(self.context.names.fresh("rank"), call("tl.cast", base, literal("tl.int32")))

    @cached_property
    def blocks(self) -> Expr:
        """How many programs each chunk has."""
        counts = [self.emitter.tile.count(a) for a in self.grid if not self.emitter.coords.is_one_block(a)]
        several = total("*", counts)
        return literal(1) if several is None else self.context.let(self.context.top, "blocks", several)

    @cached_property
    def block_of(self) -> Expr:
        """Which of them this one is."""
        if self.blocks.text == "1":
            return literal(0)
        return self.context.let(self.context.top, "block", binary("%", name("pid"), self.blocks))

    @property
    def programs(self) -> Size:
        """Of each chunk."""
        lanes = self.emitter.tile.block_sizes
        return product(cdiv(a.size, lanes.get(a, 1)) for a in self.grid)

    def is_last(self) -> Expr:
        return binary("==", self.chunk, literal(self.count - 1))

    @contextmanager
    def those_before(self) -> Iterator[Expr]:
        """Meanwhile the chunks before this one lie in the tile where steps do; by number."""
        tile, time = self.emitter.tile, self.look.time
        dims, sizes = tile.dims, tile.block_sizes
        tile.dims = tuple(self.look.before if a is time else a for a in dims)
        tile.block_sizes = {**sizes, self.look.before: self.count}
        yield tile.lane(self.look.before)
        tile.dims, tile.block_sizes = dims, sizes

    def _finish(self, steps: PartOfTime) -> None:
        """What is carried to the end is stored by the program that has been there."""
        if not self.look.ends:
            return
        scope = Scope(0, self.context.top)
        steps.keep_last()
        for sink in self.look.ends:
            self.emitter.stores.store(sink, scope)
        self.context.top.body.append(If(self.is_last(), scope.body))


class Back:
    """What is before the chunk: what chunks before it have told, on top of what is carried at first."""

    def __init__(self, loops: LookBackLoops, ends: ChunkEnds) -> None:
        self.loops, self.context, self.found = loops, loops.context, loops.look.found
        self.slots = {s: Slot(loops, s, ends.labels[s]) for f in self.found for s in (f.product, f.end)}
        for slot in self.slots.values():
            slot.store()
        self.words = Words(loops)
        self.words.tell()

    def look(self, steps: PartOfTime, turns: Turns) -> None:
        """The states before the chunk; where these are not known, or no numbers, by all steps before it."""
        top, names = self.context.top, self.context.names
        with self.loops.those_before() as before:
            is_unknown = self.words.wait(before)
            found = {f.state: self._scanned(f, before, steps.labels[f.state]) for f in self.found}
        is_first, initial = binary("==", self.loops.chunk, literal(0)), dict[LoopState, Expr]()
        for state, (value, is_wild) in found.items():
            label = steps.labels[state]
            initial[state] = top.define(names.fresh(f"{label}_first"), name(label))
            top.body.append(Accumulate(label, "=", call("tl.where", is_first, name(label), value)))
            is_unknown = binary("|", is_unknown, is_wild)
        self._walk_where(is_unknown, steps, turns, initial)

    def _scanned(self, found: Found, before: Expr, label: str) -> tuple[Expr, Expr]:
        """The state before the chunk; and whether what it is made of may have left the range of floats."""
        context, loops, top = self.context, self.loops, self.context.top
        factors, ends = (
            top.define(context.names.fresh(word), self.slots[state].of_those_before(before, neutral))
            for word, state, neutral in (("factors", found.product, "1.0"), ("ends", found.end, "0.0"))
        )
        tile, pair = loops.emitter.tile, Expr(f"({factors}, {ends})", names=factors.names | ends.names)
        dim = tile.dims.index(loops.look.before)
        runs = context.let(top, "runs", call("tl.associative_scan", pair, literal(dim), name("first_order")))
        product, sums = (Expr(f"{runs}[{n}]", names=runs.names) for n in (0, 1))
        after = top.define(context.names.fresh("after"), binary("+", binary("*", product, name(label)), sums))
        sizes = binary("<", magnitude((factors, ends, after)), largest(found.product))
        wild = binary("!=", call("tl.max", call("tl.where", sizes, literal(0), literal(1))), literal(0))
        is_last = binary("==", before, literal(loops.count - 1))
        picked = call("tl.where", is_last, after, literal("0.0"))
        own = reduced_along(tile, dim, "tl.sum", picked, found.product)
        if found.product.dtype != found.state.dtype:
            own = call("rounded", own, literal(TL[found.state.dtype]))
        return top.define(context.names.fresh(f"{label}_before"), own), top.define(context.names.fresh("is_wild"), wild)

    def _walk_where(self, condition: Expr, steps: PartOfTime, turns: Turns, initial: Mapping[LoopState, Expr]) -> None:
        """From the first step on, as if time were one."""
        look, scope = self.loops.look, Scope(0, self.context.top)
        linear = {f.state: f.linear for f in self.found}
        walk = PartOfTime(
            self.loops.emitter, LoopProgram([], [*linear], look.time, part=look.part), linear, turns, literal(0),
            call("tl.minimum", turns.first, turns.tiles),
        )  # fmt: skip
        for state, value in initial.items():
            walk.labels[state] = steps.labels[state]
            scope.body.append(Accumulate(steps.labels[state], "=", value))
        walk.emit(scope)
        self.context.top.body.append(If(condition, scope.body))


class Slot:
    """Memory in which each program keeps what its chunk makes of a state, lane by lane."""

    def __init__(self, loops: LookBackLoops, state: LoopState, label: str) -> None:
        self.loops, self.label, tile = loops, label, loops.emitter.tile
        widths = [(a, tile.block_sizes[a]) for a in tile.lanes(state.axes)]
        self.width = math.prod(n for _, n in widths)
        self.lanes = [
            loops.emitter.addresses.times(tile.lane(a), math.prod(n for _, n in widths[at + 1 :]), "slot")
            for at, (a, _) in enumerate(widths)
        ]
        slots = tidy(product([loops.count, loops.programs, self.width]))
        self.pointer = name(loops.emitter.buffers.add_scratch(label, state.dtype, slots))

    def store(self) -> None:
        """What this program has found."""
        self.loops.context.top.body.append(Store(self._at(name("pid")), name(self.label), None))

    def of_those_before(self, before: Expr, neutral: str) -> Expr:
        """What the programs of chunks before this one have: out of L2, where they have stored it."""
        slot = add(binary("*", before, self.loops.blocks), self.loops.block_of)
        return call(
            "tl.load", self._at(slot), mask=binary("<", before, self.loops.chunk), other=literal(neutral),
            cache_modifier='".cg"',
        )  # fmt: skip

    def _at(self, slot: Expr) -> Expr:
        begin = binary("*", call("tl.cast", slot, literal("tl.int64")), literal(self.width))
        address = sum_of([self.pointer, begin, *self.lanes])
        assert address is not None
        return address


class Words:
    """A word of each program, which is one once it has told what it found; zero before and after every launch."""

    def __init__(self, loops: LookBackLoops) -> None:
        self.loops, self.context, top = loops, loops.context, loops.context.top
        each = loops.count + 1  # the last counts the programs that are through
        count = tidy(product([loops.programs, each]))
        self.context.sizes.require_below(count, 1 << 31)
        pointer = loops.emitter.buffers.add_zeroed_words("told", count)
        place = literal(0) if loops.block_of.text == "0" else binary("*", loops.block_of, literal(each))
        self.first = self.context.let(top, "words", add(pointer, place))

    def tell(self) -> None:
        """Others may read what is stored by now."""
        self.context.top.body.append(Tell(add(self.first, self.loops.chunk)))

    def wait(self, before: Expr) -> Expr:
        """Until all chunks before this one are told; whether that was in vain."""
        mask = binary("<", before, self.loops.chunk)
        asked = call("in_vain", binary("+", self.first, before), mask=mask, patience=literal(PATIENCE))
        return self.context.top.define(self.context.names.fresh("is_unknown"), asked)

    def clear(self) -> None:
        """The last program to have waited leaves zeros for the next launch."""
        with self.loops.those_before() as before:
            zeros = call("tl.zeros_like", before)
            stores: list[Statement] = [Store(binary("+", self.first, before), zeros, None)]
        counter = binary("+", self.first, literal(self.loops.count))
        arrives = call("last_to_arrive", counter, literal(self.loops.count))
        self.context.top.body.append(If(arrives, stores))
