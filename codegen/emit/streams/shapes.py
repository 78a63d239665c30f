"""Vectors and tiles of a streamed kernel: what a term has lanes along is known of the term, in one order.

    [row]   [stream]   [depth]   [row, stream]   [row, depth]   [stream, depth]

A vector is of one dimension, and is spread where a tile reads it: in the layouts of matrix products a column of one
element would be held by every thread as often as the tile has columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ....ir.errors import Unfusible
from ...program.axes import Axis, Term
from ...schedule.streams.roles import Roles
from ..access.coordinates import Coord, Coordinates
from ..access.tile_axes import TileAxes
from ..context import Context
from ..statements import ATOM, Expr, Scope, binary, call, literal


@dataclass(frozen=True)
class _Place:
    """Where the program is along an axis: its first element, how many are left (None: no mask), set in this block.

    short: the first element in 32 bits, where a loop counts it.
    """

    base: Expr | None
    left: Expr | None
    scope: Scope
    level: int
    short: Expr | None = None


@dataclass(eq=False)
class Shapes:
    """The dimensions of what is emitted now, and the coordinates that go with them."""

    context: Context
    tile: TileAxes
    coords: Coordinates
    roles: Roles
    _places: dict[Axis, _Place] = field(default_factory=dict)
    _made: dict[tuple[Axis, int, int], Coord] = field(default_factory=dict)

    # ------------------------------------------------------------------ where the program is
    def take_over(self) -> None:
        """The rows, and a stream that is kept, are where the grid has set them; depths are whole."""
        kept = (self.roles.row, *((self.roles.stream,) if self.roles.keeps_stream else ()))
        for axis in kept:
            coord, size = self.coords[axis], self.context.sizes.text(axis.size)
            left = size if coord.base is None else binary("-", size, coord.base)
            self._set(axis, _Place(coord.base, left if coord.mask else None, self.context.top, coord.level))
        for axis in (*self.roles.depth, *self.roles.bins):
            is_full = axis.size == self.tile.block_sizes[axis]
            whole = None if is_full else self.context.sizes.text(axis.size)
            self._set(axis, _Place(None, whole, self.context.top, 0))

    def set_stream(self, at: Expr, scope: Scope, level: int, masked: bool) -> None:
        """The stream's block begins at `at`, of 32 bits."""
        axis = self.roles.stream
        first = scope.define(self.context.names.fresh(f"first_{axis.name}"), call("tl.cast", at, literal("tl.int64")))
        left = binary("-", self.context.sizes.text(axis.size), at) if masked else None
        self._set(axis, _Place(first, left, scope, level, at))

    def first_in_32_bits(self, axis: Axis) -> Expr:
        """The first element of the program's block, of an axis whose length 32 bits hold."""
        place = self._places[axis]
        if place.short is not None or place.base is None:
            return place.short or literal(0)
        return call("tl.cast", place.base, literal("tl.int32"))

    def _set(self, axis: Axis, place: _Place) -> None:
        self._places[axis] = place
        self._made = {key: coord for key, coord in self._made.items() if key[0] is not axis}
        self.coords[axis] = Coord(place.base, None, None, place.level)

    # ------------------------------------------------------------------ the dimensions at hand
    def dims(self, term: Term) -> tuple[Axis, ...]:
        """The axes that a term has lanes along, in order."""
        found = tuple(a for a in (self.roles.row, self.roles.stream, *self.roles.depth) if a in term.axes)
        if len(found) > 2 and term.node is not None:
            raise Unfusible(term.node, "a tile of three axes")
        return found

    @contextmanager
    def of(self, *dims: Axis) -> Iterator[None]:
        """Values with lanes along these axes, for a while."""
        before, self.tile.dims = self.tile.dims, dims
        self._orient(dims)
        yield
        self.tile.dims = before
        self._orient(before)

    def _orient(self, dims: tuple[Axis, ...]) -> None:
        for place, axis in enumerate(dims):
            if axis in self._places:
                self.coords[axis] = self._coord(axis, place, len(dims))

    def _coord(self, axis: Axis, at: int, count: int) -> Coord:
        if (axis, at, count) not in self._made:
            place, lane, mask = self._places[axis], self.tile.lane(axis), None
            if place.left is not None:
                mask = place.scope.define(
                    self.context.names.fresh(f"inside_{lane.text}"), binary("<", lane, place.left)
                )
            self._made[axis, at, count] = Coord(place.base, lane, mask, place.level)
        return self._made[axis, at, count]

    def mask_of_stream(self, term: Term | None = None) -> Expr | None:
        """The mask of a tile's columns; or, along the dimensions of a term, of what it has along the stream."""
        with self.of(*(self.dims(term) if term is not None else (self.roles.row, self.roles.stream))):
            return self.coords[self.roles.stream].mask

    def spread(self, value: Expr, have: tuple[Axis, ...]) -> Expr:
        """A vector as a tile of the dimensions at hand reads it."""
        dims = self.tile.dims
        if len(have) != 1 or len(dims) != 2 or have[0] not in dims:
            return value
        index = ", ".join(":" if a is have[0] else "None" for a in dims)
        return Expr(f"{value.inside(ATOM)}[{index}]", names=value.names)
