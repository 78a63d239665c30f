"""The tree of arrivals: programs of a group, groups of a strip, strips. The last to arrive at a counter goes on.

Deterministic, no program waits, and counters reset themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ....ir.types import product
from ...program.sizes import cdiv, tidy
from ..access.buffers import Buffers
from ..context import Context
from ..statements import Expr, Let, Statement, add, binary, call, literal, name
from ..walk import Walk

FAN = 12
"""Partial sums that one program adds: about the square root of the programs on a device."""
SMALL = 16
"""Units of a device, up to which one program adds the sums of all."""


@dataclass(slots=True)
class Level:
    """One level of arrivals: which counter counts to which number, whose slots are added, which sums are complete then.

    `first`: the first of the programs whose sums are added, `step` apart; `start`: the first within the strip.
    """

    counter: Expr
    count: Expr
    first: Expr
    step: Expr | None = None
    completes: str = "walk"
    start: Expr = field(default_factory=lambda: literal(0))
    setup: list[Statement] = field(default_factory=list)

    def is_complete(self, over_everything: bool) -> bool:
        """True where a sum is complete here, over everything or over the walk."""
        return self.completes == "all" or (self.completes == "walk" and not over_everything)


def arrival_levels(context: Context, buffers: Buffers, walk: Walk, over_everything: bool, joins: bool) -> list[Level]:
    """From the programs to the whole kernel; `joins`: the last level waits for all strips, whatever it completes."""
    programs, has_strips = walk.programs(), walk.coords.has_strips()
    base, part, strip = literal(0), name("pid"), literal(0)
    if has_strips:
        base, part, strip = binary("*", name("strip"), programs), name("part"), name("strip")
    counter = _counters(context, buffers)
    if context.target.units > SMALL:
        groups = context.sizes.fixed("GROUPS", cdiv(context.plan.programs or 1, FAN))
        fan = context.sizes.fixed("FAN", FAN)
        first = binary("*", name("group"), fan)
        members = call("tl.minimum", fan, binary("-", programs, first))
        setup: list[Statement] = [Let("group", binary("//", part, fan)), Let("members", members)]
        group = add(binary("*", strip, groups), name("group")) if has_strips else name("group")
        of_group = Level(add(counter, group), name("members"), add(base, first), None, "none", first, setup)
        # Counters of groups come first, then one of each strip, then that of the kernel
        strips = walk.strips() if has_strips else literal(1)
        own = add(add(counter, binary("*", strips, groups) if has_strips else groups), strip)
        levels = [of_group, Level(own, groups, base, fan)]
        last = add(counter, binary("*", strips, binary("+", groups, literal(1))))
    else:
        levels = [Level(add(counter, strip), programs, base)]
        last = add(counter, walk.strips()) if has_strips else counter
    if (over_everything or joins) and has_strips:
        levels.append(Level(last, walk.strips(), literal(0), programs, "all"))
    elif over_everything:
        levels[-1].completes = "all"
    return levels


def _counters(context: Context, buffers: Buffers) -> Expr:
    """Words in which programs count arrivals."""
    groups = cdiv(context.plan.programs or 1, FAN) + 1 if context.target.units > SMALL else 1
    counters = product([context.plan.strips, groups])
    context.sizes.require_below(counters, 1 << 31)
    return buffers.add_zeroed_words("arrived", tidy(counters + 1))
