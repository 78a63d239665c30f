"""The schedule of a program on a target, at the current sizes: decisions in order of importance, no search.

    roles            which axes one program covers whole, and which programs sum over
    residency        whether a row stays in registers, packed or not, or is read in chunks
    tiling           lanes of the axes that are vector dimensions, and threads for them
    reduction plan   how many persistent programs walk how many items

Each is a record, chosen by a function that sees the records before it; `Schedule` is all of them, for the emitter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import sympy

from ...ir.types import Size, product
from ..program.axes import Axis, Materialize, Term
from ..program.sizes import cdiv
from .alignment import Slide
from .occupancy import choose_stages, keeps_weights, reads_ahead
from .pieces import may_be_divided
from .reduction_plan import choose_reduction_plan, choose_walk
from .residency import choose_residency, is_hoisted, phases_of
from .roles import check_finish, choose_roles, of_few_long_rows
from .separation.online import OnlineSum
from .tiling import choose_tiling
from .workload import Workload, nodes_of


@dataclass(frozen=True)
class Schedule:
    """The decisions. `programs` and `items` are per strip (block of grid axes); both None where nothing is walked.

    shared: the row is a grid axis too. Programs walk the same rows, each keeps the sums over them of one strip; what is
    reduced along a row, over chunks of all of it, is found by the first of them to come by.
    """

    row: tuple[Axis, ...]
    chunked: bool
    walk: tuple[Axis, ...]
    grid: tuple[Axis, ...]
    tile: dict[Axis, int]
    inner: frozenset[Term]
    final: tuple[Term, ...]
    after_final: frozenset[Term]
    phase: dict[Term, int]
    items: Size | None
    programs: Size | None
    warps: int
    stages: int
    order: tuple[Axis, ...]
    hoisted: bool
    online: dict[Term, OnlineSum]
    direct: dict[Term, tuple[Axis, ...]]  # final sums with a partial sum per item, and the row axes that they keep
    shared: bool = False
    slide: Slide | None = None
    whole_axes: tuple[Axis, ...] = ()  # row axes that are in the tile from end to end, though the row is in chunks
    packed: frozenset[Term] = frozenset()  # loads that stay 16 bits wide from phase to phase; others are made anew
    ahead: bool = False  # strips read their rows before they wait for what is reduced along them
    pieces: int = 1  # of a row, whose programs walk the same items
    begins_wide: bool = False  # rows, all of them, at multiples of the widest access
    accelerated: bool = False  # tiles of its loop are copied by the tensor memory accelerator
    step: int = 1  # items between those of one program: rows that begin alike, so that its lanes stay columns

    @property
    def pinned(self) -> tuple[Axis, ...]:
        """Axes whose sizes are compiled in: they are in the tile from end to end."""
        return self.whole_axes if self.chunked else self.row

    @property
    def copies(self) -> bool:
        """Whether chunks of rows come by way of shared memory: those that are read wide do."""
        is_wide = self.slide is not None or self.begins_wide
        return self.chunked and self.stages > 1 and is_wide and not self.whole_axes

    def blocks(self, axis: Axis) -> Size:
        return cdiv(self.extent(axis), self.own_columns(axis))

    def own_columns(self, axis: Axis) -> int:
        """Columns that a block alone sums; the lanes of the boundary below are the neighbour's, too."""
        lanes = self.tile.get(axis, 1)
        shared = self.slide is not None and axis is self.slide.axis and axis in self.grid and self.step > 1
        return lanes - self.slide.group if shared and self.slide is not None else lanes

    def extent(self, axis: Axis) -> Size:
        """The size of an axis, with the neighbours that the boundary below it may bring in."""
        return axis.size + self.slide.group - 1 if self.slide is not None and axis is self.slide.axis else axis.size

    @property
    def strips(self) -> Size:
        """Blocks of the grid axes; one at least where a reduction is over them too."""
        count = product(self.blocks(a) for a in self.grid)
        return count if isinstance(count, int) or not self.final else sympy.Max(1, count)

    @property
    def lanes(self) -> int:
        return math.prod(self.tile.values())

    @property
    def tail(self) -> int:
        """Lanes of the second tile of a row that is held as two; 0 of any other."""
        return self.lanes & -self.lanes if self.lanes & (self.lanes - 1) else 0


def schedule_of(w: Workload) -> Schedule:
    """Decide. Raises Materialize or Separate where the program has to be divided."""
    # roles before all: they say which programs there are, and whether the program can be one kernel
    roles = choose_roles(w)
    few = of_few_long_rows(w, roles)
    if few and not may_be_divided(w, roles):
        raise Materialize(nodes_of(few))
    # what is read twice costs more than any choice of blocks
    residency = choose_residency(w, roles)
    # the finish is the last that may ask for a division: it depends on whether rows are in chunks
    final = set(roles.final)
    after = frozenset(t for t in w.program.terms if final and (t in final or w.under[t] & final))
    check_finish(w, roles, after, residency.chunked)
    # blocks as large as what stays in registers leaves room for
    walk = choose_walk(roles, residency)
    tiling = choose_tiling(w, roles, residency, walk)
    # last: how many programs, which depends on the bytes that one item moves
    plan = choose_reduction_plan(w, roles, residency, tiling, walk)
    if few and plan.pieces == 1:
        raise Materialize(nodes_of(few))
    hoisted = residency.chunked or is_hoisted(w, roles, tiling.lanes)
    return Schedule(
        row=roles.row, walk=plan.walk, grid=plan.grid, order=tuple(w.order),
        inner=frozenset(roles.inner), final=roles.final, after_final=after,
        chunked=residency.chunked, shared=residency.shared, packed=residency.packed, online=residency.online,
        direct=residency.direct, phase=phases_of(w, roles.inner, residency.online),
        hoisted=hoisted and (not residency.shared or keeps_weights(w, roles, tiling)),
        tile=tiling.tile, slide=tiling.slide, step=tiling.step, whole_axes=tiling.whole_axes, warps=tiling.warps,
        stages=choose_stages(w, roles, residency, tiling), ahead=reads_ahead(w, roles, residency),
        items=plan.items, programs=plan.programs, pieces=plan.pieces, begins_wide=not w.has_odd_rows,
    )  # fmt: skip
