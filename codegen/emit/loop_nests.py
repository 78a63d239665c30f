"""Coordinates of axes, and loops along them: blocks of lanes, or one element at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..program.axes import Axis, Index, Term
from .loops import Expr, For, Let, Scope, Statement, binary, call, literal, name, unary
from .strided_pairs import Pairs
from .values import FINISH, Coord, Groups


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop whose body is under construction."""

    variable: str
    over: Expr
    scope: Scope


class Nests(Pairs):
    """Where a program is along each axis."""

    def _block_coord(self, axis: Axis, place: Expr, scope: Scope, level: int, first: str | None = None) -> None:
        """Lanes from `first` on, where `place` is a block number (or, for a loop over elements, the first element)."""
        lane = self.lane(axis)
        if first is None:
            first = self.names.fresh(f"first_{axis.name}")
            scope.body.append(Let(first, binary("*", call("tl.cast", place, literal("tl.int64")), self.block(axis))))
        mask = None
        if not (isinstance(axis.size, int) and axis.size % self.plan.tile[axis] == 0):
            label = self.names.fresh("inside" if len(self.plan.tile) == 1 else f"inside_{axis.name}")
            size = self.sizes.stride(axis.size, "size") if axis is self.plan.order[-1] else self.sizes.text(axis.size)
            scope.body.append(Let(label, binary("<", lane, binary("-", size, name(first)))))
            mask = name(label)
        self.coords[axis] = Coord(name(first), lane, mask, level)

    def _scalar_coord(self, axis: Axis, place: Expr, scope: Scope, level: int) -> None:
        wide = call("tl.cast", place, literal("tl.int64"))
        label = axis.name if not scope.find(("scalar", axis)) else self.names.fresh(axis.name)
        scope.body.append(Let(label, wide))
        scope.memo[("scalar", axis)] = name(label)
        self.coords[axis] = Coord(name(label), None, None, level)

    def _open_nest(self, axes: Sequence[Axis], around: Scope, level: int, deeper: int) -> list[Loop]:
        """A nest of loops along axes, outermost first; the first has this level, the others are `deeper` each."""
        nest: list[Loop] = []
        for axis in axes:
            scope = Scope(level + deeper * len(nest), nest[-1].scope if nest else around)
            nest.append(self._loop_along(axis, scope, 1 if axis is not axes[-1] or not deeper else self.plan.stages))
        return nest

    def _loop_along(self, axis: Axis, scope: Scope, stages: int) -> Loop:
        """A loop over the chunks, or the elements, of an axis."""
        step, n = (self.block(axis) if axis in self.plan.tile else literal(1)), self.sizes.text(axis.size)
        if axis in self.plan.tile:
            self.sizes.require_countable(axis.size)
        turn = self.names.fresh(f"{axis.name}_at")
        pipelined = {"num_stages": literal(stages)} if stages > 1 else {}
        start: Expr = name(turn)
        if any(t.op == "cumsum_reverse" for t in self.program.terms):
            start = binary("-", binary("*", binary("-", call("tl.cdiv", n, step), literal(1)), step), start)
        label = self.names.fresh(f"first_{axis.name}" if axis in self.plan.tile else axis.name + "_i")
        first, end = call("tl.cast", start, literal("tl.int64")), n
        if slides := self.plan.slide is not None and axis is self.plan.slide.axis and scope.level < FINISH:
            shift = self._shift()
            first, end = binary("-", first, shift), binary("+", n, shift)
        scope.body.append(Let(label, first))
        if slides:
            self._slid_chunk(axis, name(label), scope)
        elif axis in self.plan.tile:
            self._block_coord(axis, name(label), scope, scope.level, label)
        else:
            self.coords[axis] = Coord(name(label), None, None, scope.level)
        return Loop(turn, call("tl.range", literal(0), end, step, **pipelined), scope)

    def _shift(self) -> Expr:
        """Elements between the row and the boundary of 16 bytes below it."""
        slide = self.plan.slide
        assert slide is not None
        if (known := self.body.find("shift")) is None:
            begin, _ = self.offset(Index(slide.terms, slide.offset), (), self.body, "row")
            assert begin is not None
            shift = call("tl.cast", binary("%", begin, literal(slide.group)), literal("tl.int32"))
            self.body.memo["shift"] = known = self._let(self.body, "shift", shift)
        return known

    def _slid_block(self, axis: Axis, place: Expr, scope: Scope) -> None:
        """A block of a row that begins at the boundary below it; where the row is has to be known."""
        first = binary("*", call("tl.cast", place, literal("tl.int64")), self.own(axis))
        begin = self._let(scope, f"first_{axis.name}", binary("-", first, self._shift()))
        (self._slid_strip if self.plan.step > 1 else self._slid_chunk)(axis, begin, scope)

    def _slid_row(self, axis: Axis, scope: Scope) -> None:
        """A row held whole, some lanes after the boundary."""
        assert self.plan.slide is not None
        lane, group, shift = self.lane(axis), literal(self.plan.slide.group), self._shift()
        first = self._let(scope, f"first_{axis.name}", unary("-", call("tl.cast", shift, literal("tl.int64"))))
        end = self._let(scope, "end", binary("+", self.sizes.text(axis.size), shift))
        start = binary("*", binary("//", lane, group), group)
        inside = binary("&", binary(">=", lane, shift), binary("<", lane, end))
        whole = binary("&", binary(">=", start, shift), binary("<=", binary("+", start, group), end))
        masks = [self._let(scope, wish, mask) for wish, mask in (("inside", inside), ("near", binary("<", start, end)))]
        self.coords[axis] = Coord(first, lane, masks[0], scope.level, Groups(masks[1], whole))

    def _slid_strip(self, axis: Axis, first: Expr, scope: Scope) -> None:
        """A strip that begins at the boundary: the neighbours' lanes at its ends are read, one end's is written."""
        assert self.plan.slide is not None
        lane, group, n = self.lane(axis), literal(self.plan.slide.group), self.sizes.text(axis.size)
        shift = self._shift()
        start, own = binary("*", binary("//", lane, group), group), self.own(axis)
        narrow = call("tl.minimum", binary("-", n, first), self.block(axis))
        left = self._let(scope, "left", call("tl.cast", narrow, literal("tl.int32")))
        before = self._let(scope, "before", call("tl.where", binary("<", first, literal(0)), shift, literal(0)))
        last = self._let(scope, "last", call("tl.minimum", left, own))
        end = call("tl.minimum", left, binary("+", own, shift))
        whole = binary("&", binary(">=", start, before), binary("<=", binary("+", start, group), last))
        edge = binary("|", binary("<", first, literal(0)), binary(">", binary("+", first, own), n))
        masks = {
            "inside": binary("&", binary(">=", lane, before), binary("<", lane, left)),
            "near": binary("<", start, left),
            "mine": binary("&", binary(">=", lane, before), binary("<", lane, last)),
            "summed": binary("&", binary(">=", lane, shift), binary("<", lane, end)),
        }
        inside, near, mine, summed = (self._let(scope, wish, mask) for wish, mask in masks.items())
        self.coords[axis] = Coord(first, lane, inside, scope.level, Groups(near, whole, edge, mine, summed))

    def _undo_slide(self) -> None:
        """After the walk, lanes are columns again: what the lanes before held is forgotten."""
        if self.plan.step == 1 or self.plan.slide is None:
            return
        axis = self.plan.slide.axis
        for known in [t for t in self.top.memo if isinstance(t, Term) and axis in t.axes]:
            del self.top.memo[known]
        if axis not in self.plan.grid:
            self._resident(axis)
            return
        first = self._let(self.top, f"first_{axis.name}", self._strip_begin(axis))
        end = call("tl.minimum", binary("-", self.sizes.text(axis.size), first), self.own(axis))
        self.coords[axis] = Coord(
            first, self.lane(axis), self._let(self.top, "inside", binary("<", self.lane(axis), end)), 0
        )

    def _strip_begin(self, axis: Axis) -> Expr:
        """The first column of a strip."""
        return binary("+", self.coords[axis].base or literal(0), self._shift())

    def _slid_chunk(self, axis: Axis, first: Expr, scope: Scope) -> None:
        """A chunk that begins at a boundary, some lanes before its row; masks by element and by group of 16 bytes."""
        assert self.plan.slide is not None
        lane, group, n = self.lane(axis), literal(self.plan.slide.group), self.sizes.text(axis.size)
        start = binary("*", binary("//", lane, group), group)
        narrow = call("tl.minimum", binary("-", n, first), self.block(axis))
        left = self._let(scope, "left", call("tl.cast", narrow, literal("tl.int32")))
        before = self._let(scope, "before", call("tl.where", binary("<", first, literal(0)), self._shift(), literal(0)))
        near = binary("<", start, left)
        inside = binary("&", binary(">=", lane, before), binary("<", lane, left))
        whole = binary("&", binary(">=", start, before), binary("<=", binary("+", start, group), left))
        edge = binary("|", binary("<", first, literal(0)), binary(">", binary("+", first, self.block(axis)), n))
        masks = [self._let(scope, wish, mask) for wish, mask in (("inside", inside), ("near", near))]
        self.coords[axis] = Coord(first, lane, masks[0], scope.level, Groups(masks[1], whole, edge))

    def _close_nest(self, nest: Sequence[Loop], ends: Sequence[Statement] = (), depth: int = 0) -> For:
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
