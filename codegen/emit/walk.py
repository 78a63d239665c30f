"""The walk of persistent programs: each takes a share of the items; strips of long rows walk the same items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import sympy

from ...ir.types import Size
from ..program.axes import Axis
from ..program.sizes import cdiv, same, tidy
from .access.coordinates import Coord, Coordinates
from .context import Context
from .statements import Expr, add, binary, call, literal, name


@dataclass(eq=False)
class Walk:
    """`share`: items that a program walks at most; `span`: where its share starts and stops; `total`: all items."""

    context: Context
    coords: Coordinates
    share: Size = 0
    total: Expr = field(default_factory=lambda: literal(0))
    span: Sequence[Expr] = ()

    def programs(self) -> Expr:
        """Programs of a strip."""
        return self.context.sizes.fixed("PROGRAMS", self.context.plan.programs or 1)

    def strips(self) -> Expr:
        """Blocks of the grid axes."""
        return self.context.sizes.fixed("STRIPS", self.context.plan.strips)

    def require_nonzero(self, sizes: Iterable[Size]) -> None:
        """Kernels with sizes of zero are kernels of their own."""
        for size in sizes:
            if not isinstance(size, int):
                self.context.sizes.guards[sympy.Gt(size, 0, evaluate=False)] = None

    def begin(self) -> tuple[Expr, Expr]:
        """The program's number as (strip, part of its items); with one strip, both are the number."""
        top, programs, pid = self.context.top, self.programs(), self.context.number_program()
        if self.context.plan.pieces > 1:
            pieces = self.context.sizes.fixed("PIECES", self.context.plan.pieces)
            team = top.define("team", binary("//", pid, pieces))
            top.define("own", binary("%", pid, pieces))
            return team, team
        if not self.coords.has_strips():
            return pid, pid
        return top.define("strip", binary("//", pid, programs)), top.define("part", binary("%", pid, programs))

    def loop(self, part: Expr) -> tuple[str, Expr]:
        """The variable and range of the loop over a program's share of the items."""
        plan, sizes = self.context.plan, self.context.sizes
        assert plan.items is not None and plan.programs is not None
        self.share = _items_per_program(plan.items, plan.programs, plan.step)
        self.require_nonzero(a.size for a in (*plan.walk, *plan.grid, *plan.row))
        each, outermost = sizes.fixed("ITEMS", self.share), plan.walk[0].size if plan.walk else 1
        self.total = sizes.text(outermost) if same(plan.items, outermost) else sizes.fixed("TOTAL", plan.items)
        sizes.require_below(plan.items, 1 << 30)
        stages = {"num_stages": literal(plan.stages)} if plan.stages > 1 and not plan.chunked else {}
        self.span = self._span(part, each)
        # Named where more than the loop reads them: the first row of all programs, the order of strips
        if plan.step > 1 or (plan.shared and self.coords.has_strips()):
            let, top = self.context.let, self.context.top
            self.span = [let(top, label, end) for label, end in zip(("start", "stop"), self.span, strict=True)]
        return "item", call("tl.range", *self.span, *self._stride(), **stages)

    def set_first_row(self, axis: Axis) -> None:
        """Until the walk, a program is at its first row: the others are as far from the boundary below them."""
        self.coords[axis] = Coord(call("tl.cast", self.span[0], literal("tl.int64")), None, None, 0)

    def item(self, variable: str) -> Expr:
        """The item to work on; where strips share rows, each begins with rows of its own."""
        if not (self.context.plan.shared and self.coords.has_strips()):
            return name(variable)
        step = {"step": self._stride()[0]} if self.context.plan.step > 1 else {}
        turn = call("rotated", name(variable), *self.span, name("strip"), self.strips(), **step)
        return self.context.let(self.context.body, "turn", turn)

    def _span(self, part: Expr, each: Expr) -> list[Expr]:
        """The ends of a share; programs beside each other walk every so many-th item of the same stretch."""
        place, offset = part, literal(0)
        for step in self._stride():
            place, offset = binary("//", part, step), binary("%", part, step)
            each = binary("*", each, step)
        start, stop = binary("*", place, each), binary("*", binary("+", place, literal(1)), each)
        return [add(start, offset), call("tl.minimum", stop, self.total)]

    def _stride(self) -> list[Expr]:
        """The distance from one item of a program to its next, where it is not one."""
        return [literal(self.context.plan.step)] if self.context.plan.step > 1 else []


def _items_per_program(items: Size, programs: Size, step: int) -> Size:
    """The most items that a program walks."""
    if isinstance(items, int) and isinstance(programs, int):
        return -(-cdiv(items, step) // (programs // step))
    return sympy.ceiling(sympy.sympify(cdiv(items, step)) / tidy(sympy.sympify(programs) / step))
