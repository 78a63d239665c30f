"""Pieces of a row: several programs read one row together, where one program for each would leave the device idle.

The sum over a column of many rows is a case: wide accesses make few strips of columns, and those that are under way
have to fit in L2, for the pass that reads them again. A team of programs walks the same strips; each reduces its piece.
"""

from __future__ import annotations

from ...ir.switches import is_on
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
PLAIN = frozenset({"f32", "f64", "i32", "i64"})


def choose_pieces(
    w: Workload, roles: AxisRoles, residency: Residency, tiling: Tiling, slots: int, under_way: int
) -> int:
    """Programs of a team; 1 where `under_way` rows at once, each with a program, are enough to fill the slots."""
    if not (is_on("pieces") and _is_divisible(w, roles, residency, tiling)):
        return 1
    (row,) = roles.row
    blocks = -(-w.size[row] // tiling.tile[row])
    counts = [1 << n for n in range(MOST_PIECES.bit_length()) if 1 << n <= min(blocks, slots, MOST_PIECES)] or [1]

    def filled(pieces: int) -> int:
        return pieces * min(under_way, slots // pieces)

    return next((n for n in counts if filled(n) >= EVEN * slots), max(counts, key=filled))


def _is_divisible(w: Workload, roles: AxisRoles, residency: Residency, tiling: Tiling) -> bool:
    """Passes that only reduce, then one that only stores, along one row whose elements are not next to each other."""
    if roles.final or w.scans or residency.shared or len(roles.row) != 1 or w.vector in roles.row:
        return False
    (row,) = roles.row
    if row not in tiling.tile or not 0 < w.size[row] < LONGEST or _is_short(w, w.size[row], tiling):
        return False
    phase = phases_of(w, roles.inner, residency.online)
    reduced = [phase[r.args[0]] for r in roles.inner if r not in residency.online]
    stored = [max(phase[t] for t in s.terms) for s in w.program.sinks if row in s.axes]
    plain = all(r.dtype in PLAIN and row in r.args[0].axes for r in roles.inner)
    alone = max(reduced) < min(stored, default=LONGEST)
    return plain and alone and all(s.mode == "store" for s in w.program.sinks)


def _is_short(w: Workload, rows: int, tiling: Tiling) -> bool:
    """One program for each strip takes less time than a team, though multiprocessors are idle meanwhile."""
    return w.target.kind != "interpret" and rows * tiling.tile.get(w.vector, 1) < SHORTEST
