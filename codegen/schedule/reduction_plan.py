"""The reduction plan: items that are walked, and the programs that walk them, so that partial sums weigh little."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from ...ir.types import ITEMSIZE, Size, product
from ..program.axes import Axis
from ..program.sizes import cdiv, tidy
from .residency import Residency, passes_over
from .roles import AxisRoles
from .tiling import Tiling
from .workload import Workload


@dataclass(frozen=True)
class ReductionPlan:
    """`items` and `programs` are per strip (block of grid axes); both None where nothing is walked."""

    walk: tuple[Axis, ...]
    grid: tuple[Axis, ...]
    items: Size | None = None
    programs: Size | None = None


def choose_walk(roles: AxisRoles, residency: Residency) -> tuple[Axis, ...]:
    """The axes that persistent programs walk; rows in chunks are walked, too, so that few of them are in flight."""
    return roles.outer if residency.chunked and not roles.final else roles.walk


def choose_reduction_plan(
    w: Workload, roles: AxisRoles, residency: Residency, tiling: Tiling, walk: tuple[Axis, ...]
) -> ReductionPlan:
    tile, chunked = tiling.tile, residency.chunked
    if not roles.final and not (chunked and walk and passes_over(w, roles.row, residency.online) > 1):
        return ReductionPlan((), roles.outer)
    grid = roles.row if residency.shared else tuple(a for a in roles.outer if a not in walk)
    items, strips = (product(cdiv(a.size, tile.get(a, 1)) for a in axes) for axes in (walk, grid))
    # as many programs as the device runs at once, or fewer where the rows in flight are to stay in L2
    per_unit = max(1, 16 * 32 // (tiling.warps * w.target.warp)) if w.target.kind != "interpret" else 1
    programs: Size = w.budget.units * per_unit
    if chunked and passes_over(w, roles.row, residency.online) > 1:
        programs = _fitting_l2(w, roles, tile, programs)
    programs = _per_strip(programs, strips)
    # only sums that keep lanes weigh so much that fewer programs are better
    if not any(r.axes & set(tile) for r in roles.final):
        return ReductionPlan(walk, grid, items, tidy(_least(programs, items)))
    each, most = cdiv(items, tiling.step), _rounds(programs, tiling.step)
    programs = tiling.step * _even(each, _least(most, _programs_worth_sums(w, roles, tiling, each, walk)))
    return ReductionPlan(walk, grid, items, tidy(programs))


# ------------------------------------------------------------------ bytes of partial sums
def _programs_worth_sums(w: Workload, roles: AxisRoles, tiling: Tiling, items: Size, walk: Sequence[Axis]) -> Size:
    """Programs whose partial sums weigh little; more of them rather than long walks on an idle device."""
    turns = max(w.budget.turns, w.budget.walked // tiling.lanes)
    light = cdiv(items, max(turns, _items_worth_sums(w, roles, tiling.tile, walk)))
    quick = _least(cdiv(items, max(turns, w.budget.long)), max(1, w.budget.units // 2))
    return max(light, quick) if isinstance(light, int) and isinstance(quick, int) else sympy.Max(light, quick)


def _items_worth_sums(w: Workload, roles: AxisRoles, tile: Mapping[Axis, int], walk: Sequence[Axis]) -> int:
    """Items after which a program has moved so much that its partial sums weigh little."""
    finishing = w.sinks_of(set(roles.final))
    traffic = [t for t in w.program.traffic() if t.sink not in finishing and t.axes & set(walk)]
    each = {(t.ref, t.axes): t.itemsize for t in traffic}
    width = {a: min(n, w.size[a]) for a, n in tile.items()}
    moved = sum(size * math.prod(width.get(a, 1) for a in axes) for (_, axes), size in each.items())
    sums = sum(4 * math.prod(width[a] for a in r.axes if a in tile) for r in roles.final)
    return math.ceil(sums / (w.budget.partials * moved)) if moved else 1


def _fitting_l2(w: Workload, roles: AxisRoles, tile: Mapping[Axis, int], programs: Size) -> Size:
    """So few rows in flight that the second pass over them reads L2, not memory."""
    loads = {t.param: ITEMSIZE[t.dtype] for t in w.loads if t.axes > set(roles.row)}
    width = math.prod(n for a, n in tile.items() if a not in roles.row)
    length = product(a.size for a in roles.row) * max(1, sum(loads.values())) * width
    if isinstance(length, int):
        return max(1, min(int(programs), w.target.l2 // 2 // max(1, length)))
    return sympy.Max(1, sympy.Min(programs, sympy.floor(sympy.Integer(w.target.l2 // 2) / length)))


# ------------------------------------------------------------------ arithmetic on counts
def _per_strip(programs: Size, strips: Size) -> Size:
    """ceil(programs / strips), at least one."""
    if isinstance(programs, int) and isinstance(strips, int):
        return max(1, -(-programs // max(1, strips)))
    return sympy.ceiling(sympy.sympify(programs) / (strips if strips != 0 else 1))


def _rounds(programs: Size, step: int) -> Size:
    """The times that `step` programs fit, at least once."""
    if step == 1:
        return programs
    return max(1, programs // step) if isinstance(programs, int) else sympy.Max(1, sympy.floor(programs / step))


def _least(a: Size, b: Size) -> Size:
    """The smaller one, at least one; symbols are not zero here (see Walk.require_nonzero)."""
    b = max(b, 1) if isinstance(b, int) else b
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else sympy.Min(a, b)


def _even(items: Size, programs: Size) -> Size:
    """As many programs as have something to do where all but the last walk equally many items."""
    if isinstance(items, int) and isinstance(programs, int):
        return -(-items // -(-items // programs)) if items else programs
    return sympy.ceiling(items / sympy.ceiling(sympy.sympify(items) / programs))
