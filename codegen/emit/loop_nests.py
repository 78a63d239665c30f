"""Loops along axes, by blocks of lanes or one element at a time, and flat numbers taken apart into coordinates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from ..program.axes import Axis
from .access.aligned_rows import AlignedRows
from .access.coordinates import Coord, Coordinates
from .access.tile_axes import TileAxes
from .context import FINISH, Context
from .statements import Expr, For, Let, Scope, Statement, binary, call, literal, name


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop whose body is under construction."""

    variable: str
    over: Expr
    scope: Scope


@dataclass(eq=False)
class LoopNests:
    """Loops that set coordinates. `span`: of a row in pieces the axis that is divided, where loops begin and end."""

    context: Context
    tile: TileAxes
    coords: Coordinates
    rows: AlignedRows
    span: tuple[Axis, Expr, Expr] | None = None

    @contextmanager
    def along(self, axis: Axis, first: Expr, stop: Expr) -> Iterator[None]:
        """Within the block loops along the axis are over a piece of it."""
        self.span = axis, first, stop
        yield
        self.span = None

    def open(self, axes: Sequence[Axis], outer: Scope, level: int, deeper: int) -> list[Loop]:
        """A nest of loops along axes, outermost first; the first has this level, the others are `deeper` each."""
        nest: list[Loop] = []
        for axis in axes:
            scope = Scope(level + deeper * len(nest), nest[-1].scope if nest else outer)
            stages = 1 if axis is not axes[-1] or not deeper else self.context.plan.stages
            nest.append(self._loop_along(axis, scope, stages))
        return nest

    def close(self, nest: Sequence[Loop], ends: Sequence[Statement] = (), depth: int = 0) -> For:
        """The nest as one statement; `ends` come last in the body of its first `depth` loops."""
        for place, (loop, inner) in reversed(list(enumerate(pairwise(nest), start=1))):
            loop.scope.body.append(For(inner.variable, inner.over, inner.scope.body))
            if place == depth:
                loop.scope.body.extend(ends)
        if depth == len(nest):
            nest[-1].scope.body.extend(ends)
        # What a strip computes comes after the loops, some of it before them; a piece is the same whoever reduces it
        if not self.context.plan.shared and self.context.plan.pieces == 1:
            level = nest[0].scope.parent.level if nest[0].scope.parent is not None else 0
            names = [s.name for loop in nest for s in loop.scope.body if isinstance(s, Let)]
            self.context.names.release([*names, *(loop.variable for loop in nest)], level)
        return For(nest[0].variable, nest[0].over, nest[0].scope.body)

    def set_from_flat(
        self, axes: Sequence[Axis], flat: Expr, scope: Scope, level: int, backwards: Axis | None = None
    ) -> None:  # fmt: skip
        """Coordinates out of one number, the last axis fastest; of one axis the last block may come first."""
        if level == 0:
            axes = [a for a in axes if not self.coords.is_one_block(a)]
        aligned: Expr | None = None
        for position, axis in reversed(list(enumerate(axes))):
            number = flat
            if position:
                number = binary("%", flat, self.tile.count(axis))
                remaining = self.context.names.fresh("rest")
                flat = scope.define(remaining, binary("//", flat, self.tile.count(axis)))
            if axis is backwards:
                number = binary("-", binary("-", self.tile.count(axis), literal(1)), number)
            if self.rows.covers(axis):
                aligned = number
            elif axis in self.tile.dims:
                self.coords.set_block(axis, number, scope, level)
            else:
                self.coords.set_element(axis, number, scope, level)
        # The boundary below a row is known once all other coordinates are
        if aligned is not None:
            self.rows.set_block(axes[-1], aligned, scope)

    def _loop_along(self, axis: Axis, scope: Scope, stages: int) -> Loop:
        """A loop over the chunks, or the elements, of an axis."""
        names, sizes, has_lanes = self.context.names, self.context.sizes, axis in self.tile.dims
        step, length = (self.tile.block(axis) if has_lanes else literal(1)), sizes.text(axis.size)
        if has_lanes:
            sizes.require_countable(axis.size)
        variable = names.fresh(f"{axis.name}_at")
        pipelined = {"num_stages": literal(stages)} if stages > 1 else {}
        start: Expr = name(variable)
        # Sums from the end take the chunks from the last to the first
        if is_reversed := any(t.op == "cumsum_reverse" for t in self.context.program.terms):
            last = binary("-", call("tl.cdiv", length, step), literal(1))
            start = binary("-", binary("*", last, step), start)
        label = names.fresh(f"first_{axis.name}" if has_lanes else axis.name + "_i")
        first, end = call("tl.cast", start, literal("tl.int64")), length
        if is_aligned := self.rows.covers(axis) and scope.level < FINISH:
            shift = self.rows.shift()
            first, end = binary("-", first, shift), binary("+", length, shift)
        begin = scope.define(label, first)
        if is_aligned:
            self.rows.set_chunk(axis, begin, scope)
        elif has_lanes:
            self.coords.set_lanes(axis, begin, scope, scope.level, begin if is_reversed else start)
        else:
            self.coords[axis] = Coord(begin, None, None, scope.level)
        begin_at = literal(0)
        if self.span is not None and self.span[0] is axis:
            _, begin_at, end = self.span
        return Loop(variable, call("tl.range", begin_at, end, step, **pipelined), scope)
