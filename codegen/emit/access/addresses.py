"""Addresses: a scalar part, named in the scope where it changes, and a part that varies with the lanes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ....ir.types import Size
from ...kernel import Ref
from ...program.axes import Axis, Index, Term
from ...program.sizes import tidy
from ..context import Context
from ..statements import Expr, Scope, binary, call, literal, name, sum_of, unary
from .buffers import Buffers
from .coordinates import Coordinates, Groups
from .levels import Levels
from .tile_axes import TileAxes

Indices: TypeAlias = Sequence[tuple[Expr, Size, Term]]
"""Values that an address depends on: as expression, times a coefficient, and as term."""


@dataclass(eq=False)
class Addresses:
    """Pointers to elements of buffers, and their places as numbers."""

    context: Context
    buffers: Buffers
    tile: TileAxes
    coords: Coordinates
    levels: Levels

    def pointer(
        self,
        ref: Ref,
        place: Index,
        indices: Indices,
        scope: Scope,
        axes: Iterable[Axis] = (),
        groups: Groups | None = None,
    ) -> Expr:
        """The pointer to a place, with lanes along all of `axes`; with `groups`, it is at a boundary of 16 bytes."""
        slide = self.context.plan.slide
        scalar, lanes = self.offset(place, indices, self.buffers.stem(ref))
        parts = [name(self.buffers.labels[ref])]
        # The compiler makes accesses wide only where it knows that they begin at a boundary
        if scalar is not None and groups is not None and slide is not None:
            scalar = call("tl.multiple_of", scalar, literal(slide.group))
        if scalar is not None:
            parts.append(self._shared_offset(scalar, place, indices, scope))
        if lanes is not None:
            parts.append(lanes if indices else self._shared_lanes(lanes, scope))
        pointer = _sum(parts)
        # Triton's masks and values have to have the shape of the pointer
        if self.tile.is_missing_lanes(axes, frozenset(place.walked).union(*(t.axes for _, _, t in indices))):
            pointer = binary("+", pointer, call("tl.zeros", self.tile.shape(axes), literal("tl.int32")))
        return pointer

    def offset(self, place: Index, indices: Indices, buffer: str) -> tuple[Expr | None, Expr | None]:
        """(scalar part, lane part) of an address, in elements."""
        order = self.context.plan.order
        scalar, lanes = [], []
        for axis, coefficient in sorted(place.terms, key=lambda t: (order.index(t[0]), t[0].order)):
            coord = self.coords[axis]
            if coord.base is not None:
                scalar.append(self.times(coord.base, coefficient, buffer))
            if coord.lane is not None:
                lanes.append(self._lane_times(axis, coord.lane, coefficient, buffer))
        if place.offset != 0:
            scalar.append(self.context.sizes.stride(place.offset, f"{buffer}_offset"))
        for value, coefficient, term in indices:
            (lanes if self.tile.lanes(term.axes) else scalar).append(self.times(value, coefficient, buffer))
        return sum_of(scalar), sum_of(lanes)

    def lanes_in_eights(self, place: Index) -> tuple[Expr, Expr] | None:
        """A place as lanes of the last axis, and a multiple of eight before them; None where it is no such sum."""
        axis = self.context.plan.order[-1]
        coord = self.coords[axis]
        others = Index(tuple(t for t in place.terms if t[0] is not axis), place.offset)
        is_along = dict(place.terms).get(axis) == 1 and self.tile.block_sizes[axis] % 8 == 0
        is_in_eights = self._is_in_eights(others) if coord.groups is None else self._slides_in_eights(place)
        if coord.lane is None or not (is_along and is_in_eights):
            return None
        parts = [*([self.number(others)] if others != Index() else []), *([coord.base] if coord.base else [])]
        return coord.lane, sum_of(parts) or literal(0)

    def _slides_in_eights(self, place: Index) -> bool:
        """True of a place that is at a boundary of eight elements where accesses begin at one of 16 bytes."""
        slide = self.context.plan.slide
        return slide is not None and slide.group % 8 == 0 and self.coords.groups_of(place, plain=True) is not None

    def _is_in_eights(self, place: Index) -> bool:
        """True of a number that is, and stays, a multiple of eight: by a guard, for accesses ask for four or two."""
        if not isinstance(place.offset, int) or place.offset % 8:
            return False
        return all(self.context.sizes.stays_multiple(c, 8, 8) for _, c in place.terms)

    def number(self, place: Index) -> Expr:
        """A place as the integer that it is, 64 bits wide."""
        parts = []
        for axis, coefficient in place.terms:
            coord = self.coords[axis]
            if coord.base is not None:
                parts.append(self.times(coord.base, coefficient, "index"))
            if coord.lane is not None:
                is_wide_already = coord.base is not None and coefficient == 1
                lane = coord.lane if is_wide_already else call("tl.cast", coord.lane, literal("tl.int64"))
                parts.append(self.times(lane, coefficient, "index"))
        if place.offset != 0:
            parts.append(self.context.sizes.text(place.offset, "offset"))
        return _sum(parts)

    def lanes_against(self, place: Index, value: Expr, varying: Iterable[Axis]) -> tuple[Expr, Expr] | None:
        """A place with lanes of its own, and a number that varies along other axes: both as lanes, of 32 bits."""
        axes = self.tile.lanes(place.walked)
        if place.values or len(axes) != 1 or dict(place.terms)[axes[0]] != 1 or axes[0] in varying:
            return None
        lane = self.coords[axes[0]].lane
        first, _ = self.offset(place, (), "index")
        assert lane is not None
        # of two tiles the second has a number as the first does: lanes are counted on
        lanes = literal(self.context.plan.lanes) if self.context.plan.tail else self.tile.block(axes[0])
        return lane, call("lane_of", value, first or literal(0), lanes)

    def times(self, value: Expr, coefficient: Size, buffer: str) -> Expr:
        """A value times a stride of the buffer."""
        if coefficient == 1:
            return value
        if coefficient == -1:
            return unary("-", value)
        return binary("*", value, self.context.sizes.stride(coefficient, f"{buffer}_stride"))

    def _lane_times(self, axis: Axis, lane: Expr, coefficient: Size, buffer: str) -> Expr:
        """Lanes stay 32 bits wide where the tile provably spans less."""
        is_narrow = self.context.sizes.is_narrow(tidy(coefficient * self.tile.block_sizes[axis]))
        return self.times(lane if is_narrow else call("tl.cast", lane, literal("tl.int64")), coefficient, buffer)

    def _shared_lanes(self, lanes: Expr, scope: Scope) -> Expr:
        """Lanes of two dimensions, one of them a run-time stride apart, under a name of their own."""
        if not lanes.names & set(self.context.sizes.scalars.values()) or " + " not in lanes.text:
            return lanes
        if (shared := scope.find(("lanes", lanes.text))) is None:
            home = scope.home(0)
            shared = home.memo["lanes", lanes.text] = self.context.let(home, "lanes", lanes)
        return shared

    def _shared_offset(self, scalar: Expr, place: Index, indices: Indices, scope: Scope) -> Expr:
        """The scalar part under the name `at`, in the scope where it changes."""
        if scalar.text.isidentifier() or not scalar.names:
            return scalar
        level = self.levels.deepest((term for _, _, term in indices), place.walked)
        if (shared := scope.find(("at", scalar.text))) is None:
            home = scope.home(level)
            shared = home.memo["at", scalar.text] = self.context.let(home, "at", scalar)
        return shared


def _sum(parts: Sequence[Expr]) -> Expr:
    """The sum of at least one part."""
    result = sum_of(parts)
    assert result is not None
    return result
