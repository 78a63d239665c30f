"""A loop over time to text: step by step, or many steps at once where what is carried is a linear recurrence."""

from __future__ import annotations

from collections.abc import Mapping

from ...kernel import Kernel, Target
from ...program.axes import Axis
from ...program.sizes import Hints
from ...program.terms import TermTable
from ...schedule.loops.recurrences import recurrences_of
from ...schedule.loops.roles import LoopProgram
from ...schedule.loops.tiles import chunked_tile_of, in_chunks, schedule_of, tile_of
from ...schedule.schedule import Schedule
from ...schedule.workload import Workload
from ..emit import Emitter, assemble
from ..names import Names
from .chunks import ChunkedLoop
from .steps import Loop


def kernel_of_loop(table: TermTable, program: LoopProgram, target: Target, hints: Hints, label: str) -> Kernel:
    """One kernel for a loop and what is made of its results."""
    workload = Workload(program, target, hints)
    linear = recurrences_of(table, program) if in_chunks(workload, program) else None
    chunk = None if linear is None else chunked_tile_of(workload, program)
    tile = chunk or tile_of(workload, program, hints)
    sizes = {**tile.blocks, **tile.depths}
    emitter = Emitter(program, schedule_of(program, tile), target, hints, label, name_axes, sizes)
    loop = Loop(emitter, program) if linear is None or chunk is None else ChunkedLoop(emitter, program, linear)
    loop.set_coordinates()
    loop.begin()
    loop.emit()
    loop.finish()
    return assemble(emitter, emitter.traffic())


def name_axes(plan: Schedule, names: Names) -> Mapping[Axis, str]:
    """t over T, col over N, row over M; then c over C, d over D .."""
    spare = iter("CDEFGHIJKLOPQRSUVWXYZ")
    words = iter((("col", "N"), ("row", "M")))
    letters: dict[Axis, str] = {}
    for axis in reversed(plan.order):
        word, letter = ("t", "T") if axis.turn else next(words, ("", ""))
        letters[axis] = letter = letter or next(spare, "X")
        axis.name = word or letter.lower()
        names.fresh(letter), names.fresh(axis.name)
    return letters
