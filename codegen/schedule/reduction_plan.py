"""The reduction plan: items that are walked, and the programs that walk them, so that partial sums weigh little."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from ...ir.types import ITEMSIZE, Size, product
from ..program.axes import Axis
from ..program.sizes import cdiv, evaluate_size, tidy, whole_times
from .occupancy import EVEN, evenness, programs_per_unit
from .pieces import choose_pieces, may_be_divided
from .residency import Residency, passes_over
from .roles import AxisRoles
from .tiling import LEAST_THREADS, Tiling
from .workload import Workload

RESIDENT = 2 / 3
"""Of L2, for rows of which some part is still to be read again."""
WAVES = 4
"""The most rounds of persistent programs."""
SMALL = 1 / 4
"""Of L2, for tensors whose partial sums cost less than units without work."""
BESIDE, MOST_TURNS = 4, 32
"""Turns that would take as long as what a program does before and after them, about; and the most that are weighed."""


@dataclass(frozen=True)
class ReductionPlan:
    """`items` and `programs` are per strip (block of grid axes); both None where nothing is walked.

    pieces: of a row; a program each, all of which walk the same items. `programs` counts them as one.
    """

    walk: tuple[Axis, ...]
    grid: tuple[Axis, ...]
    items: Size | None = None
    programs: Size | None = None
    pieces: int = 1


def choose_walk(roles: AxisRoles, residency: Residency) -> tuple[Axis, ...]:
    """The axes that persistent programs walk; rows in chunks are walked, too, so that few of them are in flight."""
    return roles.outer if residency.chunked and not roles.final else roles.walk


def choose_reduction_plan(
    w: Workload, roles: AxisRoles, residency: Residency, tiling: Tiling, walk: tuple[Axis, ...]
) -> ReductionPlan:
    tile, chunked = tiling.tile, residency.chunked
    again = chunked and passes_over(w, roles.row, residency.online) > 1
    if not roles.final and not (again and (walk or may_be_divided(w, roles))):
        return ReductionPlan((), roles.outer)
    grid = roles.row if residency.shared else tuple(a for a in roles.outer if a not in walk)
    items, strips = (product(cdiv(a.size, tile.get(a, 1)) for a in axes) for axes in (walk, grid))
    # as many programs as the device runs at once, or fewer where the rows in flight are to stay in L2
    slots = w.budget.units * programs_per_unit(w, roles, residency, tiling)
    pieces = 1
    if again:
        fitting = evaluate_size(_least(_fitting_l2(w, roles, tile, slots), items), w.hints)
        pieces = choose_pieces(w, roles, residency, tiling, slots, fitting)
        programs = _fitting_l2(w, roles, tile, slots // pieces)
        if pieces == 1 and not walk and not roles.final:
            return ReductionPlan((), roles.outer)
    else:
        programs = slots * _waves(w, slots, strips, tiling.step)
    programs = _per_strip(programs, strips)
    quick = None if pieces > 1 or not roles.final else _turns_of_least_time(w, roles, tiling, walk, items, strips)
    # only sums that keep lanes weigh so much that fewer programs are better
    if not any(r.axes & set(tile) for r in roles.final):
        programs = _least(programs, items if quick is None else cdiv(items, quick))
        whole = roles.row and roles.final and not chunked
        return ReductionPlan(walk, grid, items, tidy(_even(items, programs) if whole else programs), pieces)
    each, most = cdiv(items, tiling.step), _rounds(programs, tiling.step)
    worth = _programs_worth_sums(w, roles, tiling, walk, each, strips)
    if quick is not None:
        worth = _most(worth, cdiv(evaluate_size(each, w.hints), quick))
    wide = bool(roles.row) and tiling.warps * w.target.warp >= LEAST_THREADS
    most = _whole_units(w, most, worth, wide) if strips == 1 and tiling.step == 1 else most
    programs = tiling.step * _even(each, _least(most, worth))
    return ReductionPlan(walk, grid, items, tidy(programs))


def _waves(w: Workload, slots: int, strips: Size, step: int) -> int:
    """Rounds of programs, as few as fill the device evenly with equally many programs of each strip."""
    blocks = max(1, evaluate_size(strips, w.hints))

    def is_even(waves: int) -> bool:
        each = step * max(1, waves * slots // (blocks * step))
        return evenness(each * blocks, slots, w.budget.units) >= EVEN

    return next(filter(is_even, range(1, WAVES + 1)), 1)


def _whole_units(w: Workload, most: Size, worth: Size, wide: bool) -> Size:
    """Equally many programs for each multiprocessor, where sums are worth some more for a few of them.

    wide: a program alone keeps a multiprocessor's bytes on their way, a second one would only add partial sums.
    """
    units, slots = w.budget.units, evaluate_size(most, w.hints)
    programs = min(slots, evaluate_size(worth, w.hints))
    if wide and programs > units:
        return min(slots, units)
    is_uneven = programs > units and evenness(programs, slots, units) < EVEN
    return programs // units * units if is_uneven else most


# ------------------------------------------------------------------ bytes of partial sums
def _programs_worth_sums(
    w: Workload, roles: AxisRoles, tiling: Tiling, walk: Sequence[Axis], items: Size, strips: Size
) -> Size:
    """Programs whose partial sums weigh little; more of them rather than long walks on an idle device."""
    turns, worth = max(w.budget.turns, w.budget.walked // tiling.lanes), _items_worth_sums(w, roles, tiling.tile, walk)
    light = cdiv(items, max(turns, worth))
    quick = _least(cdiv(items, max(turns, w.budget.long)), max(1, w.budget.units // 2))
    # a unit without work may as well take short walks, if the sums of those weigh little, too
    busy = _least(cdiv(items, max(2, worth)), _per_strip(w.budget.units, strips))
    counts = (light, quick, busy)
    return max(counts) if all(isinstance(n, int) for n in counts) else sympy.Max(*counts)


def _items_worth_sums(w: Workload, roles: AxisRoles, tile: Mapping[Axis, int], walk: Sequence[Axis]) -> int:
    """Items after which a program has moved so much that its partial sums weigh little."""
    moved, sums = _bytes_of_item(w, roles, tile, walk)
    return math.ceil(sums / (w.budget.partials * moved)) if moved else 1


def _bytes_of_item(
    w: Workload, roles: AxisRoles, tile: Mapping[Axis, int], walk: Sequence[Axis]
) -> tuple[int, int]:
    """Bytes that an item moves, and those of the partial sums of a program."""
    finishing = w.sinks_of(set(roles.final))
    traffic = [t for t in w.program.traffic() if t.sink not in finishing and t.axes & set(walk)]
    each = {(t.ref, t.axes): t.itemsize for t in traffic}
    width = {a: min(n, w.size[a]) for a, n in tile.items()}
    moved = sum(size * math.prod(width.get(a, 1) for a in axes) for (_, axes), size in each.items())
    return moved, sum(4 * math.prod(width[a] for a in r.axes if a in tile) for r in roles.final)


def _turns_of_least_time(
    w: Workload, roles: AxisRoles, tiling: Tiling, walk: Sequence[Axis], items: Size, strips: Size
) -> int | None:
    """Items of a program where all that is moved stays in L2; None beyond.

    Partial sums are bytes, few programs are units without work, and what a program does beside its turns takes the time
    of some: the longer of both decides.
    """
    moved, sums = _bytes_of_item(w, roles, tiling.tile, walk)
    count, blocks = (max(1, evaluate_size(n, w.hints)) for n in (cdiv(items, tiling.step), strips))
    units, total = w.budget.units, moved * count * blocks * tiling.step
    if not 0 < total <= w.target.l2 * SMALL:
        return None

    def time(turns: int) -> float:
        programs = -(-count // turns) * blocks * tiling.step
        busy = -(-programs // units) * (turns + BESIDE) * moved * units
        return max(total + 2 * sums * programs, busy)

    return min(range(1, MOST_TURNS + 1), key=time)


def _fitting_l2(w: Workload, roles: AxisRoles, tile: Mapping[Axis, int], programs: int) -> Size:
    """So few rows in flight that the second pass over them reads L2, not memory; of each about half is in it."""
    loads = {t.param: ITEMSIZE[t.dtype] for t in w.loads if t.axes > set(roles.row)}
    width = math.prod(n for a, n in tile.items() if a not in roles.row)
    length = product(a.size for a in roles.row) * max(1, sum(loads.values())) * width
    room, units = int(w.target.l2 * RESIDENT), w.budget.units
    if isinstance(length, int):
        fitting = max(1, min(programs, room // max(1, length)))
        return max(min(fitting, units), fitting // units * units)
    fitting = sympy.Min(max(1, programs), whole_times(room, length))
    if programs <= units:
        return fitting
    # where there are more than units, as many for each
    return sympy.Max(sympy.Min(fitting, units), units * sympy.floor(fitting / units))


# ------------------------------------------------------------------ arithmetic on counts
def _per_strip(programs: Size, strips: Size) -> Size:
    """floor(programs / strips), at least one: one too many of all would be a wave of its own."""
    return whole_times(programs, max(1, strips) if isinstance(strips, int) else strips)


def _rounds(programs: Size, step: int) -> Size:
    """The times that `step` programs fit, at least once."""
    if step == 1:
        return programs
    return whole_times(programs, step)


def _least(a: Size, b: Size) -> Size:
    """The smaller one, at least one; symbols are not zero here (see Walk.require_nonzero)."""
    b = max(b, 1) if isinstance(b, int) else b
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else sympy.Min(a, b)


def _most(a: Size, b: Size) -> Size:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else sympy.Max(a, b)


def _even(items: Size, programs: Size) -> Size:
    """As many programs as have something to do where all but the last walk equally many items."""
    if isinstance(items, int) and isinstance(programs, int):
        return -(-items // -(-items // programs)) if items else programs
    return sympy.ceiling(items / sympy.ceiling(sympy.sympify(items) / programs))
