"""Tiles of two axes at a time: rows lie along the first, depths along the second, the stream along either.

[row, stream]   what is never in memory         [row, depth]   operands, sums         [stream, depth]   operands
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...program.axes import Axis
from ...schedule.streams.roles import Roles
from ..access.coordinates import Coord, Coordinates
from ..access.tile_axes import TileAxes
from ..context import Context
from ..statements import Expr, Scope, binary, call, literal


@dataclass(eq=False)
class Shapes:
    """Which two axes the text that is emitted now has lanes along."""

    context: Context
    tile: TileAxes
    coords: Coordinates
    roles: Roles
    streams: dict[str, Coord] = field(default_factory=dict)

    def set_depths(self) -> None:
        """Depths are whole in every tile."""
        for axis in self.roles.depth:
            with self.of(self.roles.row, axis):
                self.coords.set_whole(axis)

    @contextmanager
    def of(self, first: Axis, second: Axis) -> Iterator[None]:
        """Tiles of these two axes, for a while."""
        before = self.tile.dims, self.coords.get(self.roles.stream)
        self.tile.dims = (first, second)
        if first is self.roles.stream and "first" in self.streams:
            self.coords[first] = self.streams["first"]
        yield
        self.tile.dims = before[0]
        if before[1] is not None:
            self.coords[self.roles.stream] = before[1]

    def set_stream(self, at: Expr, scope: Scope, level: int, masked: bool) -> Expr | None:
        """The stream's block begins at `at`, of 32 bits; returns the mask of the tile's columns, where one is asked."""
        axis, names = self.roles.stream, self.context.names
        first = scope.define(names.fresh(f"first_{axis.name}"), call("tl.cast", at, literal("tl.int64")))
        size = self.context.sizes.text(axis.size)
        self.streams = {}
        for place, dims in (("first", (axis, self.roles.row)), ("second", (self.roles.row, axis))):
            self.tile.dims = dims
            lane, mask = self.tile.lane(axis), None
            if masked:
                mask = scope.define(names.fresh(f"inside_{axis.name}"), binary("<", lane, binary("-", size, at)))
            self.streams[place] = Coord(first, lane, mask, level)
        self.coords[axis] = self.streams["second"]
        return self.streams["second"].mask

    def set_kept_stream(self) -> None:
        """The program's block of a stream that its sinks keep, along the first axis of a tile too."""
        axis, top = self.roles.stream, self.context.top
        second = self.coords[axis]
        with self.of(axis, self.roles.row):
            lane, mask = self.tile.lane(axis), None
            if second.mask is not None:
                size = self.context.sizes.text(axis.size)
                left = size if second.base is None else binary("-", size, second.base)
                mask = top.define(self.context.names.fresh(f"inside_{axis.name}"), binary("<", lane, left))
        self.streams = {"first": Coord(second.base, lane, mask, second.level), "second": second}
