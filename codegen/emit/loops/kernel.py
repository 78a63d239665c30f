"""A loop over time to text: step by step, or many steps at once where what is carried is a linear recurrence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ....ir.types import ITEMSIZE, Size, product
from ...kernel import Buffer, Course, Kernel, Target
from ...program.axes import Axis, Sink
from ...program.sizes import Hints, evaluate_size, tidy
from ...program.terms import TermTable
from ...schedule.loops.delays import without_delays
from ...schedule.loops.look_back import (
    Chunked,
    LookBack,
    chunks_at,
    in_chunks_of,
    programs_of,
    tile_of_chunks,
    wanted_chunks,
    why_whole,
    without_late,
)
from ...schedule.loops.recurrences import Linear, recurrences_of
from ...schedule.loops.registers import registers_of_scans
from ...schedule.loops.roles import LoopProgram, LoopState
from ...schedule.loops.round_trips import NEARBY, Planning, RoundTrip
from ...schedule.loops.tiles import LoopTile, chunked_tile_of, in_chunks, schedule_of, tile_of
from ...schedule.schedule import Schedule
from ...schedule.workload import Workload
from ..access.traffic import Traffic, add_bytes
from ..emit import Emitter, assemble, has_all_registers, with_enough_registers
from ..names import Names
from .chunks import ChunkedLoop
from .look_back import LookBackLoops
from .round_trips import RoundTripLoops
from .steps import Loop

TEMPTING = 96
"""Registers of a thread: with as many, the compiler spills some so that a fourth program fits beside three."""


class LoopKernels(NamedTuple):
    """Kernels in order, the temporaries between them, and what is to be stored of these once all have run."""

    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...] = ()
    merged: tuple[Sink, ...] = ()

    def with_head(self, **changes: Any) -> LoopKernels:
        """The same with another first kernel, which reports read."""
        head, *others = self.kernels
        return self._replace(kernels=(replace(head, **changes), *others))


def kernels_of_loop(
    table: TermTable, program: LoopProgram, target: Target, hints: Hints, label: str, first: int, whole: str = ""
) -> LoopKernels:
    """The kernels of a loop and what is made of its results; their temporaries have numbers from `first` on.

    One. Where few elements go through much time, it is in chunks, unless `whole` says why not; then there may be
    something left to store that chunks have added up.
    """
    found = _linear(table, program, target, hints)
    if found is None:
        return _at_once(program, None, Workload(program, target, hints), label)
    program, linear = found
    workload = Workload(program, target, hints)
    whole, own = whole or why_whole(program, linear), without_late(program)
    walked = Workload(own, target, hints)
    tile = chunked_tile_of(walked, own, linear)
    wanted = 1 if whole or tile is None else wanted_chunks(workload, program, tile, linear)
    if tile is not None and chunks_at(wanted, workload) > 1:
        tile = chunked_tile_of(walked, own, linear, by_sectors=True) or tile
        wanted = wanted_chunks(workload, program, tile, linear)
    chunks = chunks_at(wanted, workload)
    if tile is None or chunks == 1:
        made = _at_once(program, linear, workload, label, whole)
    else:
        chunked = in_chunks_of(table, program, linear, workload.order, chunks, first)
        made = _in_chunks(chunked, program, tile, target, hints, label)
    return made.with_head(splits=chunks, wanted=wanted)


def _linear(
    table: TermTable, program: LoopProgram, target: Target, hints: Hints
) -> tuple[LoopProgram, dict[LoopState, Linear]] | None:  # fmt: skip
    """The program without states that can be made again, if the others are recurrences of which many steps are taken
    at once."""
    if not in_chunks(Workload(program, target, hints), program):
        return None
    lean = without_delays(table, program)
    linear = recurrences_of(table, lean)
    return None if linear is None else (lean, linear)


def _at_once(
    program: LoopProgram, linear: dict[LoopState, Linear] | None, w: Workload, label: str, whole: str = ""
) -> LoopKernels:
    """One kernel of all steps: many of a linear recurrence at once, where its tile has room for them."""
    tile = None if linear is None else chunked_tile_of(w, program, linear)
    if linear is not None and tile is not None:
        loop: Loop = ChunkedLoop(_emitter(program, tile, w.target, w.hints, label), program, linear)
        course: Course | None = _course(program, tile, w.target, whole=whole)
    else:
        tile = tile_of(w, program, w.hints)
        loop = Loop(_emitter(program, tile, w.target, w.hints, label), program)
        course = _course_by_step(program, tile, w.target)
    kernel = replace(_made(loop), course=course)
    if linear is not None and isinstance(loop, ChunkedLoop):
        kernel = _with_registers(kernel, registers_of_scans(program, linear, tile.blocks, tile.warps * w.target.warp))
    return LoopKernels((kernel,))


def _with_registers(kernel: Kernel, wanted: int) -> Kernel:
    """A kernel whose compiler may not spill for another program on a multiprocessor, where it would be tempted."""
    if kernel.roomy or wanted < TEMPTING:
        return kernel
    return with_enough_registers(kernel)


def kernel_of_round_trip(trip: RoundTrip, planning: Planning, label: str) -> Kernel:
    """The kernel of two loops over the same lanes."""
    target, tile = planning.target, planning.tile
    emitter = _emitter(trip, tile, target, planning.hints, label)
    RoundTripLoops(emitter, trip).emit()
    kernel = assemble(emitter, traffic_of_round_trip(emitter, trip, planning))
    again = 0 if trip.blocks is None else trip.blocks.steps
    course = Course(trip.time.size, 1, programs_of(tile), target.units, parts=_parts_of(trip), again=again)
    return replace(kernel, roomy=has_all_registers(kernel, emitter.context), course=course)


def traffic_of_round_trip(emitter: Emitter, trip: RoundTrip, planning: Planning) -> Traffic:
    """Bytes that the kernel moves, with those that the first loop reads twice."""
    traffic = emitter.traffic()
    for load in planning.read_again(trip):
        moved = product(a.size for a in load.axes) * ITEMSIZE[load.dtype]
        add_bytes(traffic.reads, emitter.buffers.labels[load.param.ref], tidy(moved))
    return traffic


def _course(
    program: LoopProgram, tile: LoopTile, target: Target, chunks: int = 1, whole: str = ""
) -> Course:
    steps, block = program.time.size, tile.blocks[program.time]
    return Course(steps, block, programs_of(tile), target.units, chunks, whole, _parts_of(program))


def _parts_of(program: LoopProgram) -> Size:
    """The programs that share the sums of a step."""
    return 1 if program.part is None else program.part.axis.size


def _course_by_step(program: LoopProgram, tile: LoopTile, target: Target) -> Course | None:
    """For reports, where that step by step is not all."""
    parts = _parts_of(program)
    return None if parts == 1 else Course(program.time.size, 1, programs_of(tile), target.units, parts=parts)


def _in_chunks(
    chunked: Chunked, program: LoopProgram, tile: LoopTile, target: Target, hints: Hints, label: str
) -> LoopKernels:
    """One kernel, whose programs look back."""
    look = chunked.program
    emitter = _emitter(look, tile_of_chunks(tile, look.axis), target, hints, label, look)
    LookBackLoops(emitter, look, tile.blocks[look.time]).emit()
    kernel = assemble(emitter, _traffic_in_chunks(emitter, look))
    course = _course(program, tile, target, int(look.axis.size))
    course = replace(course, launches=1 + bool(chunked.merged), passes=1 + bool(look.found))
    kernel = replace(kernel, roomy=has_all_registers(kernel, emitter.context), course=course)
    return LoopKernels((kernel,), chunked.buffers, chunked.merged)


def _traffic_in_chunks(emitter: Emitter, look: LookBack) -> Traffic:
    """Bytes that the kernel moves: what is read twice comes out of L2 where that holds all that is read in between."""
    traffic, target, hints = emitter.traffic(), emitter.context.target, emitter.context.hints
    labels, again = emitter.buffers.labels, dict[str, Size]()
    for load in look.read_twice:
        add_bytes(again, labels[load.param.ref], tidy(product(a.size for a in load.axes) * ITEMSIZE[load.dtype]))
    between = sum(evaluate_size(n, hints) for n in again.values())
    stays = between <= target.l2 // NEARBY
    for label, moved in again.items():
        add_bytes(traffic.cached if stays else traffic.reads, label, moved)
    return traffic


def _emitter(
    program: LoopProgram, tile: LoopTile, target: Target, hints: Hints, label: str, look: LookBack | None = None
) -> Emitter:  # fmt: skip
    sizes = {**tile.blocks, **tile.depths}
    naming = partial(name_axes, look=look)
    return Emitter(program, schedule_of(program, tile), target, hints, label, naming, sizes)


def _made(loop: Loop) -> Kernel:
    """The kernel of a loop."""
    loop.set_coordinates()
    loop.begin()
    loop.emit()
    loop.finish()
    kernel = assemble(loop.emitter, loop.emitter.traffic())
    return replace(kernel, roomy=has_all_registers(kernel, loop.context))


def name_axes(plan: Schedule, names: Names, look: LookBack | None = None) -> Mapping[Axis, str]:
    """t over T, col over N, row over M, chunk over C, those before one over B; then d over D, e over E .."""
    spare = iter("DEFGHIJKLOPQRSUVWXYZ" if look else "CDEFGHIJKLOPQRSUVWXYZ")
    words = iter((("col", "N"), ("row", "M")))
    letters: dict[Axis, str] = {}
    times = dict.fromkeys(a.size for a in reversed(plan.order) if a.turn)
    for axis in reversed(plan.order):
        # a second loop may be of another length
        own = ("t", "T" if axis.size == next(iter(times)) else "") if axis.turn else None
        if look is not None:
            own = {look.axis: ("chunk", "C"), look.before: ("before", "B")}.get(axis, own)
        word, letter = own or next(words, ("", ""))
        letters[axis] = letter = letter or next(spare, "X")
        axis.name = word or letter.lower()
        names.fresh(letter), names.fresh(axis.name)
    return letters
