"""Pieces of a row: several programs read one row together, where one program for each would leave the device idle.

The sum over a column of many rows is a case: wide accesses make few strips of columns, and those that are under way
have to fit in L2, for the pass that reads them again. A team of programs walks the same strips; each reduces its piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...ir.switches import is_on
from ..program.axes import Axis
from .occupancy import EVEN
from .residency import Residency, phases_of
from .roles import AxisRoles
from .tiling import Tiling
from .workload import Workload

MOST_PIECES = 128
LONGEST = 1 << 30
"""Elements of a row in pieces: 32 bits count a few blocks more."""
SHORTEST = 1 << 15
"""Elements of a strip in pieces: fewer are reduced in the microseconds that a team waits for its pieces."""
PLAIN = frozenset({"f16", "bf16", "f32", "f64", "i32", "i64"})


def choose_pieces(
    w: Workload, roles: AxisRoles, residency: Residency, tiling: Tiling, slots: int, under_way: int
) -> int:
    """Programs of a team; 1 where `under_way` rows at once, each with a program, are enough to fill the slots."""
    if not _is_divisible(w, roles, residency, tiling):
        return 1
    divided = divided_axis(w.order, roles.row)
    blocks = -(-w.size[divided] // tiling.tile.get(divided, 1))
    counts = [1 << n for n in range(MOST_PIECES.bit_length()) if 1 << n <= min(blocks, slots, MOST_PIECES)] or [1]

    def filled(pieces: int) -> int:
        return pieces * min(under_way, slots // pieces)

    return next((n for n in counts if filled(n) >= EVEN * slots), max(counts, key=filled))


def divided_axis(order: Sequence[Axis], row: Sequence[Axis]) -> Axis:
    """The axis of a row that is in pieces: the outermost, so that a piece is as near in memory as the row is."""
    return next(a for a in order if a in row)


def may_be_divided(w: Workload, roles: AxisRoles) -> bool:
    """True where whatever a program reduces or stores, along rows, it does along all of a row."""
    row = frozenset(roles.row)
    plain = all(r.dtype in PLAIN and row <= r.args[0].axes for r in roles.inner)
    whole = all(s.mode == "store" and row & set(s.axes) in (set(), row) for s in w.program.sinks)
    return is_on("pieces") and bool(row) and plain and whole and not roles.final and not w.scans


def _is_divisible(w: Workload, roles: AxisRoles, residency: Residency, tiling: Tiling) -> bool:
    """Passes that only reduce, then one that only stores; one axis of a row has lanes for pieces."""
    if not may_be_divided(w, roles) or residency.shared or tiling.slide is not None:
        return False
    along, divided = [a for a in roles.row if a in tiling.tile], divided_axis(w.order, roles.row)
    if len(along) != 1 or not 0 < w.size[divided] < LONGEST or _is_short(w, roles, tiling):
        return False
    phase = phases_of(w, roles.inner, residency.online)
    reduced = [phase[r.args[0]] for r in roles.inner if r not in residency.online]
    stored = [max(phase[t] for t in s.terms) for s in w.program.sinks if divided in s.axes]
    return max(reduced) < min(stored, default=LONGEST)


def _is_short(w: Workload, roles: AxisRoles, tiling: Tiling) -> bool:
    """One program for each strip takes less time than a team, though multiprocessors are idle meanwhile."""
    beside = math.prod(n for a, n in tiling.tile.items() if a not in roles.row)
    return w.target.kind != "interpret" and w.elements(roles.row) * beside < SHORTEST
