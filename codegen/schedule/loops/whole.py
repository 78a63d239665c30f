"""All that is summed in one program: where a kernel moves so little that a second launch would take longer.

Every axis that something is reduced along, or that not all stores have, is a row, from end to end in registers; all
others are the grid. Nothing is written between one sum and the next one, along whatever axes these are, and no program
adds up what others have summed.
"""

from __future__ import annotations

import math

from ....ir.errors import Unfusible
from ...program.axes import Axis
from ...program.sizes import power_of_two
from ..registers import ROOM
from ..residency import Residency, phases_of
from ..roles import AxisRoles
from ..schedule import Schedule
from ..workload import Workload
from .registers import registers_at_once

LANES = 1 << 13
"""Of a tile, at most."""
FEW = 1 << 10
"""Of a tile, where it has blocks of the grid beside its rows."""
PER_THREAD = 4
"""Elements for each thread, at least."""
MOST_WARPS = 16
BYTES = 1 << 15
"""What a program moves while another launch would begin, about."""


def whole_schedule_of(w: Workload) -> Schedule:
    """One program for all that is summed. Raises Unfusible where registers do not hold that."""
    whole = {a for t in (*w.reductions, *w.scans) for a in t.param}
    # what some store lacks would be computed, and stored, by a program for each place of it
    whole |= {a for a in w.order if any(a not in s.axes for s in w.program.sinks)}
    row, outer = (tuple(a for a in w.order if (a in whole) is side) for side in (True, False))
    tile = _tile_of(w, row, outer)
    warps = power_of_two(max(1, min(MOST_WARPS, math.prod(tile.values()) // (w.target.warp * PER_THREAD))))
    registers = registers_at_once(w.program.terms, tile, warps * w.target.warp)
    if w.target.kind != "interpret" and registers > ROOM:
        raise Unfusible(w.program.sinks[0].node, "registers do not hold all that is summed")
    roles, residency = AxisRoles(row, outer, (), tuple(w.reductions), ()), Residency()
    return Schedule(
        row=row, walk=(), grid=outer, order=tuple(w.order), inner=frozenset(roles.inner), final=(),
        after_final=frozenset(), chunked=False, phase=phases_of(w, roles.inner, residency.online), hoisted=False,
        online={}, direct={}, tile=tile, items=None, programs=None, warps=warps, stages=1,
        begins_wide=not w.has_odd_rows,
    )  # fmt: skip


def _tile_of(w: Workload, row: tuple[Axis, ...], outer: tuple[Axis, ...]) -> dict[Axis, int]:
    """The rows, and lanes of the grid's fastest axis where they are short."""
    held = {a: power_of_two(w.size[a]) for a in row}
    lanes = math.prod(held.values())
    if lanes > LANES:
        raise Unfusible(w.program.sinks[0].node, f"{lanes} elements are summed, which no program holds")
    beside = min(power_of_two(w.size[outer[-1]]), FEW // lanes) if outer else 1
    tile = held | ({outer[-1]: beside} if beside > 1 else {})
    return {a: tile[a] for a in w.order if a in tile}
