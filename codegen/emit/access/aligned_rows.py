"""Rows that begin anywhere, taken from the boundary of 16 bytes below them: coordinates with masks by groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...program.axes import Axis, Index, Term
from ...schedule.alignment import Slide
from ..context import Context
from ..statements import Expr, Scope, binary, call, literal, unary
from .addresses import Addresses
from .coordinates import Coord, Coordinates, Groups
from .tile_axes import TileAxes


class Lanes(NamedTuple):
    """The lanes of a block from a boundary on: where each one's group starts; where the row begins and ends."""

    lane: Expr
    group: Expr
    start: Expr
    end: Expr
    before: Expr

    def inside(self) -> Expr:
        return self.until(self.before, self.end)

    def until(self, begin: Expr, end: Expr) -> Expr:
        """The mask of the lanes between two places."""
        return binary("&", binary(">=", self.lane, begin), binary("<", self.lane, end))

    def whole_groups(self, end: Expr) -> Expr:
        """The mask of the groups that lie between the begin of the row and `end`."""
        return _whole_groups(self.start, self.group, self.before, end)


@dataclass(eq=False)
class AlignedRows:
    """Coordinates along the axis of `plan.slide`."""

    context: Context
    tile: TileAxes
    coords: Coordinates
    addresses: Addresses

    @property
    def slide(self) -> Slide:
        assert self.context.plan.slide is not None
        return self.context.plan.slide

    def covers(self, axis: Axis) -> bool:
        """True where this axis begins at a boundary that depends on the row."""
        return self.context.plan.slide is not None and axis is self.slide.axis

    def shift(self) -> Expr:
        """Elements between the row and the boundary below it."""
        body = self.context.body
        if (shift := body.find("shift")) is None:
            begin, _ = self.addresses.offset(Index(self.slide.terms, self.slide.offset), (), "row")
            assert begin is not None
            distance = call("tl.cast", binary("%", begin, literal(self.slide.group)), literal("tl.int32"))
            shift = body.memo["shift"] = self.context.let(body, "shift", distance)
        return shift

    # ------------------------------------------------------------------ coordinates
    def set_row(self, axis: Axis, scope: Scope) -> None:
        """A row held whole, some lanes after the boundary."""
        let = self.context.let
        lane, group, shift = self.tile.lane(axis), literal(self.slide.group), self.shift()
        self.context.sizes.require_at_most(self.context.plan.extent(axis), self.tile.block_sizes[axis])
        # The first lane is that many elements before the row
        first = let(scope, f"first_{axis.name}", unary("-", call("tl.cast", shift, literal("tl.int64"))))
        end = let(scope, "end", binary("+", self.context.sizes.text(axis.size), shift))
        start = binary("*", binary("//", lane, group), group)
        inside = let(scope, "inside", binary("&", binary(">=", lane, shift), binary("<", lane, end)))
        near = let(scope, "near", binary("<", start, end))
        self.coords[axis] = Coord(
            first, lane, inside, scope.level, Groups(near, _whole_groups(start, group, shift, end))
        )

    def set_block(self, axis: Axis, number: Expr, scope: Scope) -> None:
        """A block of a row, by its number; where the row is has to be known."""
        first = binary("*", call("tl.cast", number, literal("tl.int64")), self.tile.own(axis))
        begin = self.context.let(scope, f"first_{axis.name}", binary("-", first, self.shift()))
        (self._set_strip if self.context.plan.step > 1 else self.set_chunk)(axis, begin, scope)

    def set_chunk(self, axis: Axis, first: Expr, scope: Scope) -> None:
        """A chunk that begins at a boundary, some lanes before its row; masks by element and by group."""
        lanes = self._lanes(axis, first, scope)
        edge = self._edge(axis, first, self.tile.block(axis))
        inside = self.context.let(scope, "inside", lanes.inside())
        near = self.context.let(scope, "near", binary("<", lanes.start, lanes.end))
        groups = Groups(near, lanes.whole_groups(lanes.end), edge)
        self.coords[axis] = Coord(first, lanes.lane, inside, scope.level, groups)

    def _set_strip(self, axis: Axis, first: Expr, scope: Scope) -> None:
        """A strip that begins at the boundary: the neighbours' lanes at its ends are read, one end's is written."""
        let, own, shift = self.context.let, self.tile.own(axis), self.shift()
        lanes = self._lanes(axis, first, scope)
        last = let(scope, "last", call("tl.minimum", lanes.end, own))
        end = call("tl.minimum", lanes.end, binary("+", own, shift))
        edge = self._edge(axis, first, own)
        inside = let(scope, "inside", lanes.inside())
        near = let(scope, "near", binary("<", lanes.start, lanes.end))
        mine = let(scope, "mine", lanes.until(lanes.before, last))
        summed = let(scope, "summed", lanes.until(shift, end))
        groups = Groups(near, lanes.whole_groups(last), edge, mine, summed)
        self.coords[axis] = Coord(first, lanes.lane, inside, scope.level, groups)

    def _lanes(self, axis: Axis, first: Expr, scope: Scope) -> Lanes:
        let, lane, group = self.context.let, self.tile.lane(axis), literal(self.slide.group)
        remaining = call("tl.minimum", binary("-", self.context.sizes.text(axis.size), first), self.tile.block(axis))
        end = let(scope, "left", call("tl.cast", remaining, literal("tl.int32")))
        is_first = binary("<", first, literal(0))
        before = let(scope, "before", call("tl.where", is_first, self.shift(), literal(0)))
        return Lanes(lane, group, binary("*", binary("//", lane, group), group), end, before)

    def _edge(self, axis: Axis, first: Expr, width: Expr) -> Expr:
        """True where a row begins or ends within the block."""
        ends = binary(">", binary("+", first, width), self.context.sizes.text(axis.size))
        return binary("|", binary("<", first, literal(0)), ends)

    def undo(self) -> None:
        """After the walk, lanes are columns again: the values that the lanes before had are forgotten."""
        top, axis = self.context.top, self.slide.axis
        for term in [t for t in top.memo if isinstance(t, Term) and axis in t.axes]:
            del top.memo[term]
        if axis not in self.context.plan.grid:
            self.coords.set_whole(axis)
            return
        begin = binary("+", self.coords[axis].base or literal(0), self.shift())
        first = self.context.let(top, f"first_{axis.name}", begin)
        end = call("tl.minimum", binary("-", self.context.sizes.text(axis.size), first), self.tile.own(axis))
        inside = self.context.let(top, "inside", binary("<", self.tile.lane(axis), end))
        self.coords[axis] = Coord(first, self.tile.lane(axis), inside, 0)


def _whole_groups(start: Expr, group: Expr, begin: Expr, end: Expr) -> Expr:
    """The mask of whole groups between two places."""
    return binary("&", binary(">=", start, begin), binary("<=", binary("+", start, group), end))
