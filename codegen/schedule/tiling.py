"""Block sizes: lanes of the axes that are vector dimensions, threads for them, and where a block begins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...ir.switches import is_on
from ..kernel import MOST_REGISTERS, most_registers
from ..program.axes import Axis
from ..program.sizes import power_of_two
from .alignment import GROUP, Slide
from .registers import ROOM, registers_of
from .residency import LIGHT, Residency, is_read_lightly
from .roles import STRIP, AxisRoles
from .workload import Workload

SHARED_ROW = 8192
"""Columns of a strip of rows that several programs walk together: two accumulators of it fit in registers."""
COLUMNS = 32
"""Of a strip that is reduced along its rows: a few whole sectors of each."""
SMALL = 1 << 13
"""Elements for each multiprocessor, of a tensor whose strips are too few for the device."""
NARROWEST = 512
"""Lanes of a block, along the vector, that is narrower than it might be: whole accesses of two warps."""
TAIL = 8
"""Lanes of the first of two tiles over those of the second, at most: each thread has some of both."""
FULL = 64
"""Lanes that are worth a program; below them more axes give it theirs: those of many small matrices."""
MOST_OUTER = 2
WASTED = 1.1
"""Lanes of blocks over those of narrower ones, beyond which they are narrower."""
MANY = 96
"""Programs for each multiprocessor, from which on a block that nothing is reduced in has twice the lanes: of fewer ones
the last wave weighs more than what they begin with."""
THREADS = 1024
"""Of the largest program."""
LEAST_THREADS = 256
"""Of a program that holds rows whole and keeps sums over them."""


@dataclass(frozen=True)
class Tiling:
    """Lanes by axis, in loop order; axes that are not in it are scalars. `step`: as in `Schedule`."""

    tile: dict[Axis, int]
    slide: Slide | None
    step: int
    whole_axes: tuple[Axis, ...]
    warps: int

    @property
    def lanes(self) -> int:
        return math.prod(self.tile.values())


def choose_tiling(w: Workload, roles: AxisRoles, residency: Residency, walk: Sequence[Axis]) -> Tiling:
    # what a block begins with depends on its lanes, and warps on both: narrow accesses want more of them
    tile = _tile(w, roles, residency, walk if roles.final else ())
    slide = _slide(w, roles, residency, tile, walk)
    step = slide.group if slide is not None and _keeps_columns(w, roles) else 1
    narrow = residency.chunked and slide is None and w.has_odd_rows
    # a thread that keeps two numbers of all that it reads has registers for twice the lanes
    light = not narrow and is_read_lightly(w, roles, residency)
    doubled = light or _begins_seldom(w, roles)
    lanes = math.prod(tile.values()) * (4 if narrow else 1) // (2 if doubled else 1)
    warps = _warps(w, lanes, bool(roles.accumulators))
    # so do chunks that are read wide: half of the threads ask for addresses, and there are two programs to wait
    wide = not residency.chunked or (not residency.shared and slide is None and not w.has_odd_rows)
    if roles.accumulators and wide:
        warps = _warps_of_whole_rows(w, roles, residency, tile, slide, warps)
    if _is_split(tile):
        warps = _warps_of_two_tiles(w, roles, residency, tile, warps)
    return Tiling(tile, slide, step, _whole_axes(w, roles, residency, tile), warps)


# ------------------------------------------------------------------ lanes
def _tile(w: Workload, roles: AxisRoles, residency: Residency, summed: Sequence[Axis]) -> dict[Axis, int]:
    if not w.order:
        return {}
    row, chunked = roles.row, residency.chunked
    tile, room = _row_tile(w, roles, residency, summed)
    strip = STRIP if summed and not row and w.vector not in summed else room
    # what is summed first: its lanes are added up in registers, at no cost in memory
    across = sorted((a for a in reversed(w.order) if a in roles.outer and a not in tile), key=lambda a: a not in summed)
    _add_outer(w, tile, room, across, bool(row), strip)
    tile = {a: n for a, n in tile.items() if n > 1 or (a in row and not chunked)}
    return {a: tile[a] for a in w.order if a in tile}


def _row_tile(
    w: Workload, roles: AxisRoles, residency: Residency, summed: Sequence[Axis]
) -> tuple[dict[Axis, int], int]:
    """Lanes of the row (or of a strip that begins like one), and how many times them a program has room for."""
    row, vector = roles.row, w.vector
    alone = _is_alone(w, row, residency.chunked, summed)
    if row and not residency.chunked:
        if _is_two_tiles(w, row):
            return {w.vector: w.size[w.vector]}, 1
        tile = {a: power_of_two(w.size[a]) for a in row}
        return tile, 1 if alone else max(1, w.budget.lanes // math.prod(tile.values()))
    if row:
        return _chunk(w, row, residency.shared), 1
    room = w.budget.lanes * (2 if _begins_seldom(w, roles) else 1) // (2 if summed else 1)
    return ({vector: min(power_of_two(w.size[vector]), room)}, 1) if alone else ({}, room)


def _begins_seldom(w: Workload, roles: AxisRoles) -> bool:
    """Blocks of 16 bits that only stream by: twice the lanes for as many threads, each of which begins half as often.

    That is four accesses a thread, as of 32 bits. Words of random numbers take the registers of so many elements; where
    all operations are light, bytes on their way count, of which there are fewer.
    """
    if w.target.kind == "interpret" or roles.row or roles.final or w.scans:
        return False
    if math.prod(w.size.values()) < MANY * w.budget.units * w.budget.lanes or (w.has_odd_rows and w.slide is None):
        return False
    steps = (dict(t.place.terms).get(w.vector, 0) for t in w.program.traffic())
    widest = max((t.itemsize for t in w.program.traffic() if w.vector in t.axes), default=GROUP)
    operations = {t.op for t in w.program.terms} - {"load"}
    return widest <= 2 and all(n in (0, 1) for n in steps) and not operations <= LIGHT and "random" not in operations


def _is_two_tiles(w: Workload, row: Sequence[Axis]) -> bool:
    """A row that two tiles hold without a lane outside, where a program has one at a time; see `emit/access`."""
    if list(row) != [w.vector] or not isinstance(w.vector.size, int) or w.slide is not None or not is_on("tails"):
        return False
    size, lanes = w.vector.size, power_of_two(w.vector.size)
    tail = size - lanes // 2
    is_sum = lanes // (2 * TAIL) <= tail < lanes // 2 and tail & (tail - 1) == 0
    steps = (dict(t.place.terms).get(w.vector, 0) for t in w.program.traffic())
    return is_sum and 2 * lanes > w.budget.lanes and not w.scans and all(step in (0, 1) for step in steps)


def _chunk(w: Workload, row: Sequence[Axis], shared: bool) -> dict[Axis, int]:
    """Lanes for the innermost axes of a row, as many as a chunk may have."""
    room = w.budget.chunk if w.vector in row else min(128, w.budget.chunk // 16)
    if shared and w.target.kind != "interpret":
        room = SHARED_ROW // (2 if w.has_odd_rows else 1)
    tile: dict[Axis, int] = {}
    for a in reversed(row):
        tile[a] = min(power_of_two(w.size[a]), room)
        room //= tile[a]
    return tile


def _add_outer(w: Workload, tile: dict[Axis, int], room: int, outer: list[Axis], row: bool, strip: int) -> None:
    """Blocks for the vector, then for the next axes, until a program has enough lanes."""
    vector = w.vector
    if vector in outer:
        least = min(_columns_of_strip(w, outer) if row else 1, power_of_two(w.size[vector]))
        second = [a for a in outer if a is not vector and w.weight[a] * 4 > w.weight[vector]]
        most = min(room, 64) if second and room > 64 else min(room, strip)
        tile[vector] = _fitting(w, min(power_of_two(w.size[vector]), max(least, most)))
        room //= tile[vector]
        outer = [*second, *(a for a in outer if a is not vector and a not in second)]
    for place, a in enumerate(outer):
        if place and w.target.kind != "interpret" and math.prod(tile.values()) >= FULL:
            return
        if room > 1 and len(tile) < 4 and place < MOST_OUTER:
            tile[a] = min(power_of_two(w.size[a]), room)
            room //= tile[a]


def _fitting(w: Workload, lanes: int) -> int:
    """Lanes of the vector: fewer where that many leave much of the last block outside; then a block has more rows.

    5120 columns are three blocks of 2048 lanes, and five of 1024.
    """
    size = w.size[w.vector]
    widths = [n for n in (lanes, lanes // 2, lanes // 4) if n >= NARROWEST] or [lanes]
    covered = {n: -(-size // n) * n for n in widths}
    best = min(widths, key=lambda n: (covered[n], -n))
    return best if w.target.kind != "interpret" and covered[lanes] > WASTED * covered[best] else lanes


def _columns_of_strip(w: Workload, outer: Sequence[Axis]) -> int:
    """Columns that are reduced together: fewer where a small tensor has few strips, as far as accesses allow.

    Strips then share the sectors of a row; that costs nothing where all of it is in L2.
    """
    total = math.prod(w.size.values())
    widest = GROUP // min((t.itemsize for t in w.program.traffic() if w.vector in t.axes), default=GROUP)
    counts = [n for n in (COLUMNS, COLUMNS // 2, COLUMNS // 4) if n >= widest or n == COLUMNS]
    strips = w.elements(a for a in outer if a is not w.vector)
    if total > SMALL * w.budget.units or w.target.kind == "interpret":
        return COLUMNS
    return next((n for n in counts if strips * -(-w.size[w.vector] // n) >= w.budget.units), counts[-1])


def _whole_axes(w: Workload, roles: AxisRoles, residency: Residency, tile: dict[Axis, int]) -> tuple[Axis, ...]:
    """The vector, where it fits: then the loop around it is the innermost, and its loads are in flight ahead."""
    if not residency.chunked or residency.shared or w.scans or w.vector not in roles.row or len(roles.row) < 2:
        return ()
    return (w.vector,) if w.size[w.vector] <= tile.get(w.vector, 1) else ()


# ------------------------------------------------------------------ where a block begins
def _is_alone(w: Workload, row: Sequence[Axis], chunked: bool, summed: Sequence[Axis]) -> bool:
    """A tile is one odd row (or a strip of one), so that it may begin at the boundary below it."""
    if w.slide is None or chunked:
        return False
    if not row:
        return _rows_repeat(w, summed) and w.vector not in summed and w.size[w.vector] >= w.budget.wide
    lanes = power_of_two(w.size[w.vector])
    return list(row) == [w.vector] and lanes >= max(w.budget.wide, w.size[w.vector] + w.slide.group - 1)


def _rows_repeat(w: Workload, walk: Sequence[Axis]) -> bool:
    """Every so many items a row begins at the same place between two boundaries."""
    return w.slide is not None and len(walk) == 1 and walk[0] in dict(w.slide.terms)


def _keeps_columns(w: Workload, roles: AxisRoles) -> bool:
    """Sums over rows, of every column its own."""
    return any(w.vector in r.axes for r in roles.final)


def _slide(
    w: Workload, roles: AxisRoles, residency: Residency, tile: dict[Axis, int], walk: Sequence[Axis]
) -> Slide | None:
    """Where rows, chunks or blocks of them begin at the boundary below: lanes mean other columns in every row."""
    row, chunked = roles.row, residency.chunked
    if w.slide is None or list(tile) != w.order[-1:] or list(row) not in ([], w.order[-1:]):
        return None
    ((vector, lanes),) = tile.items()
    if _keeps_columns(w, roles):
        fits = _rows_repeat(w, walk)
    elif row:
        fits = not (chunked and (residency.direct or w.scans))
    else:
        fits = not roles.final and not (isinstance(vector.size, int) and vector.size <= lanes)
    # a row held whole needs lanes for its neighbours, too
    fits = fits and (not row or chunked or _is_alone(w, row, chunked, walk))
    return w.slide if fits and lanes % w.slide.group == 0 and lanes > w.slide.group else None


# ------------------------------------------------------------------ threads
def _warps(w: Workload, lanes: int, accumulators: bool) -> int:
    steps = ((512, 1), (2048, 4), *(((4095, 8), (8192, 16)) if accumulators else ((8192, 8), (16384, 16))))
    warps = next((n for most, n in steps if lanes <= most), 32)
    most, leant = THREADS // w.target.warp, int(warps * 2.0**w.target.leaning.warps)
    return max(1, min(most, leant * 32 // w.target.warp))


def _warps_of_whole_rows(
    w: Workload, roles: AxisRoles, residency: Residency, tile: dict[Axis, int], slide: Slide | None, warps: int
) -> int:
    """Half of them where twice the elements fit in a thread: a warp reduces a row in as many steps, however wide.

    A program keeps eight warps: fewer wait for one another where there is one program on a multiprocessor.
    """
    half = warps // 2
    if half * w.target.warp < LEAST_THREADS:
        return warps
    return half if registers_of(w, roles, residency, tile, slide, half) <= ROOM else warps


def _is_split(tile: Mapping[Axis, int]) -> bool:
    """One row, as long as two tiles are together."""
    return any(n & (n - 1) for n in tile.values())


def _warps_of_two_tiles(
    w: Workload, roles: AxisRoles, residency: Residency, tile: Mapping[Axis, int], warps: int
) -> int:
    """So few that each thread reads whole accesses of the second tile, too, where its elements fit in registers."""
    (lanes,) = tile.values()
    each = (lanes & -lanes) // (GROUP // min(t.itemsize for t in w.program.traffic() if w.vector in t.axes))
    least = LEAST_THREADS if roles.accumulators else LEAST_THREADS // 2
    while warps * w.target.warp > max(each, least) and _has_room(w, roles, residency, tile, warps // 2):
        warps //= 2
    return warps


def _has_room(w: Workload, roles: AxisRoles, residency: Residency, tile: Mapping[Axis, int], warps: int) -> bool:
    """What lives at a time fits in registers; weights of a program with one row are read when they are needed."""
    registers, most = registers_of(w, roles, residency, tile, None, warps), most_registers(warps * w.target.warp)
    if roles.accumulators:
        return registers * MOST_REGISTERS <= ROOM * most
    weights = [t for t in w.row_loads(roles.row) if not t.axes - set(roles.row)]
    return registers - len(weights) * (math.prod(tile.values()) // (warps * w.target.warp)) <= most
