"""Where a program is along each axis: the first element of its block, its lanes, and the mask of those inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...program.axes import Axis, Index
from ..context import FINISH, Context
from ..names import WIDTH
from ..statements import Expr, Scope, binary, call, literal
from .tile_axes import TileAxes


@dataclass(frozen=True, slots=True)
class Coord:
    """A coordinate, base + lane, and the mask of the lanes that lie inside."""

    base: Expr | None
    lane: Expr | None
    mask: Expr | None
    level: int
    groups: Groups | None = None


@dataclass(frozen=True, slots=True)
class Groups:
    """Masks by groups of 16 bytes: what is read, what is written wide; and whether any lane here is at an edge.

    Where neighbours share lanes, each writes and each sums only its own.
    """

    near: Expr
    whole: Expr
    edge: Expr | None = None
    stored: Expr | None = None
    summed: Expr | None = None


class Coordinates(dict[Axis, Coord]):
    """The coordinate of each axis, as far as the loops that are open have set them."""

    def __init__(self, context: Context, tile: TileAxes) -> None:
        super().__init__()
        self._context, self._tile = context, tile

    # ------------------------------------------------------------------ to set
    def set_whole(self, axis: Axis) -> None:
        """The program holds all of the axis."""
        top, lane, mask = self._context.top, self._tile.lane(axis), None
        block, sizes = self._tile.block_sizes[axis], self._context.sizes
        sizes.require_at_most(axis.size, block)
        if axis.size != block:
            label = self._mask_label(axis)
            size = sizes.stride(axis.size, "size") if axis is self._context.plan.order[-1] else sizes.text(axis.size)
            mask = top.define(label, binary("<", lane, size))
        self[axis] = Coord(None, lane, mask, 0)

    def set_block(self, axis: Axis, number: Expr, scope: Scope, level: int) -> None:
        """The program is at a block, by its number."""
        self._tile.lane(axis)
        first = self._context.names.fresh(f"first_{axis.name}")
        wide = call("tl.cast", number, literal("tl.int64"))
        self.set_lanes(axis, scope.define(first, binary("*", wide, self._tile.block(axis))), scope, level)

    def set_lanes(self, axis: Axis, first: Expr, scope: Scope, level: int, narrow: Expr | None = None) -> None:
        """The program is at the lanes from the element `first` on; `narrow`: the same, as wide as the size is."""
        plan, sizes = self._context.plan, self._context.sizes
        lane, mask, block = self._tile.lane(axis), None, self._tile.block_sizes[axis]
        # A mask that changes in each turn of a loop is asked for each element, however many there are in a turn
        is_chunk = plan.chunked and axis in plan.row and 1 < level < FINISH
        largest = block if is_chunk else WIDTH if axis in plan.walk and level == 1 else 0
        if not sizes.stays_multiple(axis.size, block, largest):
            label = self._mask_label(axis)
            size = sizes.stride(axis.size, "size") if axis is plan.order[-1] else sizes.text(axis.size)
            mask = scope.define(label, binary("<", lane, binary("-", size, narrow or first)))
        self[axis] = Coord(first, lane, mask, level)

    def set_element(self, axis: Axis, number: Expr, scope: Scope, level: int) -> None:
        """The program is at one element of an axis without lanes."""
        label = axis.name if not scope.find(("scalar", axis)) else self._context.names.fresh(axis.name)
        element = scope.memo["scalar", axis] = scope.define(label, call("tl.cast", number, literal("tl.int64")))
        self[axis] = Coord(element, None, None, level)

    def before(self, axes: Iterable[Axis]) -> dict[Axis, Coord]:
        """Where the axes are before loops along them; for `restore`."""
        return {a: self[a] for a in axes if a in self}

    def restore(self, axes: Iterable[Axis], before: Mapping[Axis, Coord]) -> None:
        """After loops along these axes, they are where they were."""
        for axis in axes:
            del self[axis]
        self.update(before)

    def _mask_label(self, axis: Axis) -> str:
        return self._context.names.fresh("inside" if len(self._tile.dims) == 1 else f"inside_{axis.name}")

    # ------------------------------------------------------------------ to ask
    def is_one_block(self, axis: Axis) -> bool:
        """True where the axis needs no coordinate: one block holds it, whatever the sizes."""
        if not self._tile.is_whole_in_a_block(axis):
            return False
        if axis not in self:
            self.set_whole(axis)
        return True

    def has_strips(self) -> bool:
        """True where the grid has more than one block."""
        return any(not self.is_one_block(a) for a in self._context.plan.grid)

    def masks(self, axes: Iterable[Axis], summed: bool = False) -> list[Expr]:
        """The masks of the lanes that lie inside; `summed`: of those that no other program sums or writes."""
        varying = set(axes)
        masked = [c for a in self._context.plan.order if a in varying and (c := self[a]).mask is not None]
        return [c.groups.summed if summed and c.groups and c.groups.summed else c.mask for c in masked if c.mask]

    def groups_of(self, place: Index, plain: bool) -> Groups | None:
        """The masks of an access that begins at a boundary of 16 bytes; None for any other."""
        slide = self._context.plan.slide
        return self[slide.axis].groups if slide is not None and slide.holds(place, plain) else None

    def is_lent(self, axis: Axis) -> bool:
        """True where some lanes inside are a neighbour's to sum."""
        groups = self[axis].groups
        return groups is not None and groups.summed is not None
