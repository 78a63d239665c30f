"""Coordinates of axes, and loops along them: blocks of lanes, or one element at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .axes import Axis
from .loops import Expr, For, Let, Scope, Statement, binary, call, literal, name
from .values import Coord, Values


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop whose body is under construction."""

    variable: str
    over: Expr
    scope: Scope


class Nests(Values):
    """Where a program is along each axis."""

    def _blocked(self, axis: Axis, place: Expr, scope: Scope, level: int, first: str | None = None) -> None:
        """Lanes from `first` on, where `place` is a block number (or, for a loop over elements, the first element)."""
        lane = self.lane(axis)
        if first is None:
            first = self.names.fresh(f"first_{axis.name}")
            scope.body.append(Let(first, binary("*", call("tl.cast", place, literal("tl.int64")), self.block(axis))))
        mask = None
        if not (isinstance(axis.size, int) and axis.size % self.plan.tile[axis] == 0):
            label = self.names.fresh("inside" if len(self.plan.tile) == 1 else f"inside_{axis.name}")
            size = self._step(axis.size, "size") if axis is self.plan.order[-1] else self.size(axis.size)
            scope.body.append(Let(label, binary("<", lane, binary("-", size, name(first)))))
            mask = name(label)
        self.coords[axis] = Coord(name(first), lane, mask, level)

    def _scalar(self, axis: Axis, place: Expr, scope: Scope, level: int) -> None:
        wide = call("tl.cast", place, literal("tl.int64"))
        label = axis.name if not scope.find(("scalar", axis)) else self.names.fresh(axis.name)
        scope.body.append(Let(label, wide))
        scope.memo[("scalar", axis)] = name(label)
        self.coords[axis] = Coord(name(label), None, None, level)

    def _nest(self, axes: Sequence[Axis], around: Scope, level: int, deeper: int) -> list[Loop]:
        """A nest of loops along axes, outermost first; the first has this level, the others are `deeper` each."""
        nest: list[Loop] = []
        for axis in axes:
            scope = Scope(level + deeper * len(nest), nest[-1].scope if nest else around)
            nest.append(self._loop_along(axis, scope, 1 if axis is not axes[-1] or not deeper else self.plan.stages))
        return nest

    def _loop_along(self, axis: Axis, scope: Scope, stages: int) -> Loop:
        """A loop over the chunks, or the elements, of an axis."""
        step, n = (self.block(axis) if axis in self.plan.tile else literal(1)), self.size(axis.size)
        turn = self.names.fresh(f"{axis.name}_at")
        pipelined = {"num_stages": literal(stages)} if stages > 1 else {}
        start: Expr = name(turn)
        if any(t.op == "cumsum_reverse" for t in self.program.terms):
            start = binary("-", binary("*", binary("-", call("tl.cdiv", n, step), literal(1)), step), start)
        label = self.names.fresh(f"first_{axis.name}" if axis in self.plan.tile else axis.name + "_i")
        scope.body.append(Let(label, call("tl.cast", start, literal("tl.int64"))))
        if axis in self.plan.tile:
            self._blocked(axis, name(label), scope, scope.level, label)
        else:
            self.coords[axis] = Coord(name(label), None, None, scope.level)
        return Loop(turn, call("tl.range", literal(0), n, step, **pipelined), scope)

    def _close(self, nest: Sequence[Loop], ends: Sequence[Statement] = (), depth: int = 0) -> For:
        """The nest as one statement; `ends` come last in the body of its first `depth` loops."""
        for place, (loop, inner) in reversed(list(enumerate(pairwise(nest), start=1))):
            loop.scope.body.append(For(inner.variable, inner.over, inner.scope.body))
            if place == depth:
                loop.scope.body.extend(ends)
        if depth == len(nest):
            nest[-1].scope.body.extend(ends)
        if not self.plan.shared:  # what a strip computes comes after the loops, but some of it stands before them
            self.names.release([loop.variable for loop in nest])
            self.names.release([s.name for loop in nest for s in loop.scope.body if isinstance(s, Let)])
        return For(nest[0].variable, nest[0].over, nest[0].scope.body)
