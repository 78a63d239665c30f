"""Blocks of a loop over time: as many programs as there are units, and no more lanes than registers hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ....ir.errors import Unfusible
from ....ir.switches import is_on
from ....ir.types import ITEMSIZE
from ...kernel import Target
from ...program.axes import Axis, Term
from ...program.sizes import Hints, power_of_two
from ..registers import ROOM
from ..schedule import Schedule
from ..workload import Workload
from .recurrences import Linear, is_multiplied
from .registers import registers_of, registers_of_chunks
from .roles import LoopProgram, LoopState, Part

LANES = (1024, 512, 256, 128, 64, 32)
"""Of one program, largest first: carried values, and what a step makes of them, are in registers."""
LEAST = 16
"""The shortest side of what is multiplied."""
MOST = 1 << 14
"""Elements of a tile along axes that a step reduces along."""
HELD = 1 << 12
"""Elements of a tile, where it can be as small: a step holds several such tiles."""
WIDEST = 1 << 15
"""Elements of a tile of which no value has all axes, at most: threads along an axis that it lacks repeat a value."""
PER_THREAD = 4
"""Elements of a tile for each thread, at least."""
STAGES = 8
"""Turns whose loads are in flight, at most."""
SHARED = 0.9
"""Of the shared memory of a multiprocessor, for loads in flight and what products read."""


class LoopTile(NamedTuple):
    """The axes of the grid in loop order; lanes by axis in the order of the tile, then depths of products."""

    grid: tuple[Axis, ...]
    whole: tuple[Axis, ...]
    blocks: dict[Axis, int]
    depths: dict[Axis, int]
    warps: int
    stages: int


ROWS, CHUNK = 64, 2048
"""Steps that are taken at once, at most, and elements of such a tile."""
MULTIPLIED = 2
"""States by factors of their own for which such a tile has room: for three it has half the steps and half the lanes."""
FEW, LONG = 4, 2048
"""The same of a program that sums a part: steps at least, and elements."""
SECTOR = 8
"""Neighbours that memory hands out together, of 32 bits."""
LANES_OF_UNIT = 512
"""Elements that go through time by themselves, for each unit: with as many, their loads fill the bandwidth."""


def in_chunks(w: Workload, program: LoopProgram) -> bool:
    """Many steps at once pay where few elements go through time, or time is what is contiguous in memory."""
    if program.part is not None:
        return is_on("at_once") and w.size[program.time] > LEAST
    beside = math.prod(max(1, w.size[a]) for a in w.order if a is not program.time)
    is_few = beside < LANES_OF_UNIT * w.target.units or w.vector is program.time
    return is_on("at_once") and w.size[program.time] > LEAST and is_few


def chunked_tile_of(
    w: Workload, program: LoopProgram, linear: Mapping[LoopState, Linear], by_sectors: bool = False
) -> LoopTile | None:
    """A tile of many steps; None where what a step reduces along leaves no room for it.

    by_sectors: of fewer steps, if need be, so that what is contiguous is read by whole sectors: as time is in chunks,
    fewer programs in each of them do not matter.
    """
    if program.part is not None:
        return _chunked_tile_of_part(w, program, program.part, linear)
    time = program.time
    order = [a for a in w.order if a is not time]
    whole = tuple(a for a in order if a in program.whole)
    grid = tuple(a for a in order if a not in program.whole)
    held = {a: power_of_two(w.size[a]) for a in whole}
    shares = power_of_two(max(1, sum(map(is_multiplied, program.states)) - MULTIPLIED + 1))
    room = CHUNK // (math.prod(held.values()) * shares**2)
    steps = min(ROWS // shares, power_of_two(w.size[time]))
    if room < steps:
        return None
    size = power_of_two(w.size[grid[-1]]) if grid else 1
    is_wide = by_sectors and bool(grid) and grid[-1] is w.vector
    rows = min(steps, room // min(SECTOR, size)) if is_wide else steps
    lanes = min(room // rows, size)
    blocks = {**held, **({grid[-1]: lanes} if lanes > 1 else {}), time: rows}
    warps = power_of_two(max(1, min(4, math.prod(blocks.values()) // (w.target.warp * PER_THREAD))))
    return LoopTile(grid, whole, {a: blocks[a] for a in w.order if a in blocks}, {}, warps, 1)


def _chunked_tile_of_part(
    w: Workload, program: LoopProgram, part: Part, linear: Mapping[LoopState, Linear]
) -> LoopTile | None:
    """Steps for the lanes that are summed, as many as fit beside them and registers hold; None for a few."""
    one = _tile_of_part(w, program, part)
    rows = _most_steps(w, program.time, one.blocks)
    if rows < FEW:
        return None
    tiles = [_of_rows(w, one, program.time, n) for n in halves(rows) if n > 1]
    return next((tile for tile in tiles if _holds_chunks(w, program, tile, linear)), tiles[-1])


def _most_steps(w: Workload, time: Axis, blocks: Mapping[Axis, int]) -> int:
    """For which the lanes of one step leave room."""
    lanes = math.prod(n for axis, n in blocks.items() if axis is not time)
    return min(ROWS, power_of_two(w.size[time]), LONG // lanes)


def steps_of_a_turn(w: Workload, program: LoopProgram, tile: LoopTile) -> int:
    """What chunks of time are measured by: fewer steps at once, for want of registers, take less than a turn."""
    steps = tile.blocks[program.time]
    return steps if program.part is None else max(steps, _most_steps(w, program.time, tile.blocks))


def _of_rows(w: Workload, one: LoopTile, time: Axis, rows: int) -> LoopTile:
    """So many steps at once of the tile for one."""
    blocks = {**one.blocks, time: rows}
    warps = power_of_two(max(1, min(8, math.prod(blocks.values()) // (w.target.warp * PER_THREAD))))
    return one._replace(blocks={a: blocks[a] for a in w.order if a in blocks}, warps=warps, stages=1)


def _holds_chunks(w: Workload, program: LoopProgram, tile: LoopTile, linear: Mapping[LoopState, Linear]) -> bool:
    """Registers hold what a tile of steps needs: sums along two axes leave none over."""
    if w.target.kind == "interpret":
        return True
    return registers_of_chunks(program, linear, tile.blocks, tile.warps * w.target.warp) <= ROOM


def _tile_of_part(w: Workload, program: LoopProgram, part: Part) -> LoopTile:
    """One step for the lanes that are summed, and a few of the axis with the smallest stride, if that is another."""
    order = [a for a in w.order if a is not part.axis and not a.turn]
    whole = tuple(a for a in order if a in program.whole)
    grid = tuple(a for a in order if a not in program.whole)
    blocks = {**{a: power_of_two(w.size[a]) for a in whole}, part.of: part.block}
    if grid[-1] is not part.of:
        lanes = lanes_beside(w.size[grid[-1]])
        blocks |= {grid[-1]: lanes} if lanes > 1 else {}
    warps = power_of_two(max(1, min(8, math.prod(blocks.values()) // (w.target.warp * PER_THREAD))))
    kept = {a: blocks[a] for a in order if a in blocks}
    return LoopTile(grid, whole, kept, {}, warps, _stages(program, kept, w.target))


def lanes_beside(size: int) -> int:
    """Lanes along the axis with the smallest stride, where another is summed in blocks."""
    return min(LANES[-1], power_of_two(size))


def tile_of(w: Workload, program: LoopProgram, hints: Hints) -> LoopTile:
    """The largest block of the grid's fastest axis with which all units of the device have work."""
    if program.part is not None:
        return _tile_of_part(w, program, program.part)
    order = [a for a in w.order if not a.turn and a not in program.depths]
    least = LEAST if program.products else 1
    whole = tuple(a for a in order if a in program.whole)
    grid = tuple(a for a in order if a not in program.whole)
    held = {a: max(least, power_of_two(w.size[a])) for a in whole}
    depths = {a: max(least, power_of_two(w.size[a])) for a in w.order if a in program.depths}
    tall = math.prod(held.values())
    if tall > MOST:
        raise Unfusible(program.states[0].update.node, f"a step reduces {tall} elements, which no program holds")
    if program.products and (len(whole) != 1 or not grid):
        raise Unfusible(program.states[0].update.node, "a product without rows and columns")
    order = order if not program.products else [*grid, *whole]
    counts = [n for n in halves(max(least, _lanes(w, grid, tall))) if n >= least]
    tiles = [_of_lanes(w, grid, order, held, n) for n in counts]
    blocks, warps = next((tile for tile in tiles if _fits(w, program, *tile)), tiles[-1])
    return LoopTile(grid, whole, blocks, depths, warps, _stages(program, {**blocks, **depths}, w.target))


def _of_lanes(
    w: Workload, grid: Sequence[Axis], order: Sequence[Axis], held: dict[Axis, int], lanes: int
) -> tuple[dict[Axis, int], int]:
    """The tile with so many lanes of the grid's fastest axis, in order, and its warps."""
    blocks = {**({grid[-1]: lanes} if grid and lanes > 1 else {}), **held}
    warps = power_of_two(max(1, min(8, math.prod(blocks.values()) // (w.target.warp * PER_THREAD))))
    return {a: blocks[a] for a in order if a in blocks}, warps


def _fits(w: Workload, program: LoopProgram, blocks: dict[Axis, int], warps: int) -> bool:
    """Registers hold what a step needs. Of products as much is in shared memory as in these."""
    if w.target.kind == "interpret" or program.products:
        return True
    return max(registers_of(p, blocks, warps * w.target.warp) for p in program.walks) <= ROOM


def halves(largest: int) -> list[int]:
    """A power of two and all smaller ones."""
    return [1 << k for k in reversed(range(largest.bit_length()))]


def _stages(program: LoopProgram, blocks: dict[Axis, int], target: Target) -> int:
    """Turns whose loads are in flight, as far as shared memory holds them; one by one on other devices."""
    if target.kind != "cuda":
        return 1
    sides = [side for p in program.products for side in (p.args[0], p.args[1], p.args[1])]  # a matrix: as it is, turned
    room = int(target.shared * SHARED) - sum(_bytes(t, blocks) for t in sides)
    if room < 0:
        raise Unfusible(program.states[0].update.node, "its matrix is more than shared memory holds")
    turn = max(sum(_bytes(t, blocks) for t in p.terms if t.op == "load" and p.time in t.axes) for p in program.walks)
    return max(1, min(STAGES, room // max(1, turn)))


def _bytes(term: Term, blocks: dict[Axis, int]) -> int:
    """Of a term's tile."""
    return math.prod(blocks.get(a, 1) for a in term.axes) * ITEMSIZE[term.dtype]


def _lanes(w: Workload, grid: tuple[Axis, ...], tall: int) -> int:
    if not grid:
        return 1
    size, others = w.size[grid[-1]], math.prod(max(1, w.size[a]) for a in grid[:-1])
    if w.target.kind == "interpret":
        return min(1 << 12, max(16, power_of_two(size) // 2))
    few = max(1, min(LANES[-1], power_of_two(size), WIDEST // tall))
    fitting = [n for n in LANES if n * tall <= HELD and n < 2 * size] or [few]
    busy = [n for n in fitting if -(-size // n) * others >= w.target.units]
    return busy[0] if busy else fitting[-1]


def schedule_of(program: LoopProgram, tile: LoopTile) -> Schedule:
    """The tile as a schedule."""
    scalars = (a for a in (*tile.grid, *tile.whole) if a not in tile.blocks)
    by_step = tuple(a for a in program.axes if a.turn and a not in tile.blocks)
    by_step += (*((program.part.axis,) if program.part is not None else ()), *program.beside)
    return Schedule(
        row=tile.whole, chunked=False, walk=(), grid=tile.grid, tile=dict(tile.blocks), inner=frozenset(), final=(),
        after_final=frozenset(), phase={}, items=None, programs=None, warps=tile.warps, stages=tile.stages,
        order=(*by_step, *tile.depths, *scalars, *tile.blocks),
        hoisted=True, online={}, direct={},
    )  # fmt: skip
