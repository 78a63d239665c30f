"""Occupancy: programs that a multiprocessor runs side by side, how evenly they fill the device, and loads in flight.

Registers are known once a kernel is compiled, the number of persistent programs before: it is taken from an estimate.
One program too many is a second wave, twice the time; one too few costs little: the estimate is a careful one.
"""

from __future__ import annotations

import math

from ...ir.switches import is_on
from ...ir.types import ITEMSIZE
from ..program.axes import Term
from .registers import registers_of
from .residency import Residency
from .roles import AxisRoles
from .tiling import Tiling
from .workload import Workload

REGISTERS = 1 << 16
"""Of one multiprocessor, 32 bits each."""
USUAL, MOST, LEAST = 16, 24, 12
"""Warps of a multiprocessor: where nothing is known, where programs want few registers, and where they want many."""
FLYING = 40 << 10
"""Bytes that a multiprocessor has to wait for at any time, so that its share of the bandwidth is used."""
EVEN = 0.75
"""The share of the device that works, from which on more programs are not worth their partial sums."""
AHEAD = 12
"""Bytes for each column of a strip that registers hold while a program waits for what all strips share."""
HELD = 8
"""Elements of weights that a thread keeps from row to row, beside all else that it holds of a strip."""
STAGES = 6
"""The most turns of a loop under way at once."""


# ------------------------------------------------------------------ programs
def programs_per_unit(w: Workload, roles: AxisRoles, residency: Residency, tiling: Tiling) -> int:
    """Persistent programs that one multiprocessor surely runs at once."""
    if w.target.kind == "interpret":
        return 1
    warps = USUAL
    if w.target.kind == "cuda":
        fitting = REGISTERS // (32 * registers_of(w, roles, residency, tiling.tile, tiling.slide, tiling.warps))
        warps = min(USUAL, max(LEAST, fitting)) if roles.row else max(USUAL, min(MOST, fitting))
    return max(1, warps * 32 // (tiling.warps * w.target.warp))


def evenness(programs: int, slots: int, units: int) -> float:
    """The share of the device that works, on average over the time of the slowest multiprocessor."""
    at_once = slots if programs > slots else units
    return programs / (-(-programs // at_once) * at_once)


# ------------------------------------------------------------------ loads
def choose_stages(w: Workload, roles: AxisRoles, residency: Residency, tiling: Tiling) -> int:
    """Turns of a loop under way at once, as far as shared memory holds their loads; 1: only registers are used.

    Of n turns one is computed, and the loads of the last begin when it is done: those of n - 2 are in flight meanwhile.
    """
    if w.target.kind == "hip" or not is_on("stages"):
        return 1
    tile, at_once = tiling.tile, programs_per_unit(w, roles, residency, tiling)
    # a row that no item changes is not read in the loop
    again = [t for t in w.loads if t.axes & set(tile) and (residency.chunked or t.axes - set(roles.row))]
    turn = sum(ITEMSIZE[t.dtype] * math.prod(n for a, n in tile.items() if a in t.axes) for t in _distinct(again))
    loops = residency.chunked or bool(roles.final)
    least, most = (3, min(STAGES, 2 + -(-FLYING // max(1, turn * at_once)))) if loops else (2, 2)
    room = w.target.shared * (3 if residency.chunked else 2) // 4 // at_once
    return next((n for n in range(most + w.target.leaning.stages, least - 1, -1) if (n - 1) * turn <= room), 1)


def reads_ahead(w: Workload, roles: AxisRoles, residency: Residency) -> bool:
    """A strip's rows are read before what all strips share is there: registers hold them beside its sums meanwhile."""
    rows = [t for t in w.row_loads(roles.row) if t.axes - set(roles.row)]
    return residency.shared and sum(ITEMSIZE[t.dtype] for t in rows) + 4 * len(roles.accumulators) < AHEAD


def keeps_weights(w: Workload, roles: AxisRoles, tiling: Tiling) -> bool:
    """A strip's weights stay in registers where its rows begin at odd places: they are read element by element then."""
    weights = [t for t in w.row_loads(roles.row) if not t.axes - set(roles.row)]
    each = tiling.lanes // (tiling.warps * w.target.warp)
    return tiling.slide is not None and each * len(weights) <= HELD and is_on("hoist")


def _distinct(loads: list[Term]) -> list[Term]:
    """One load of every buffer."""
    return list({t.param: t for t in loads}.values())
