"""Sizes in the emitted text: numbers, constants, scalar arguments; and the conditions under which the text is right."""

from __future__ import annotations

import sympy

from ...ir.errors import Unfusible
from ...ir.types import Size
from ..schedule.axes import Program
from ..schedule.sizes import Hints, nonnegative, tidy
from ..schedule.sizes import number as evaluated
from .loops import Expr, literal, name
from .names import Names

SPAN = 1 << 29
"""Elements between the first and last lane of a tile, below which 32 bits count them in bytes, too."""
MOST = (1 << 31) - 1
LONGEST = MOST - (1 << 17)
"""Lengths from here to MOST have no kernel: with a block more they leave 32 bits, in which they are passed."""


class SizeArguments:
    """The scalar arguments and constants of one kernel, and its guards.

    `wide`: names of scalars whose divisibility makes accesses wide.
    """

    def __init__(self, program: Program, hints: Hints, names: Names) -> None:
        self.program, self.hints, self.names = program, hints, names
        self.scalars: dict[Size, str] = {}
        self.constants: dict[str, int | str] = {}
        self.guards: dict[sympy.Basic, None] = {}
        self.wide: set[str] = set()

    def text(self, size: Size, wish: str = "size") -> Expr:
        """A size as text: a number, the name of an axis's size, or a scalar argument."""
        size = tidy(size)
        if isinstance(size, int):
            known = next((n for n, v in self.constants.items() if v == size and v > 16 and len(n) == 1), None)
            return name(known) if known else literal(size)
        if size not in self.scalars:
            self.scalars[size] = self.names.fresh(wish)
        return name(self.scalars[size])

    def fixed(self, label: str, size: Size) -> Expr:
        """A size under its own name: a constant where it is a number, else a scalar argument."""
        if isinstance(size, int):
            self.constants[label] = size
            return name(label)
        self.scalars.setdefault(size, label)
        return name(self.scalars[size])

    def stride(self, size: Size, wish: str) -> Expr:
        """A size whose divisibility decides how wide accesses are."""
        text = self.text(size, wish)
        self.wide |= text.names
        return text

    def require_countable(self, size: Size) -> None:
        """Lengths that are counted in blocks: 32 bits hold a block more, or they are 64 bits wide as they are."""
        now = evaluated(size, self.hints)
        if LONGEST <= now <= MOST:
            raise Unfusible(self.program.sinks[0].node, f"a length of {now} is the end of what 32 bits count")
        if not isinstance(size, int):
            short = now < LONGEST
            self.guards[sympy.Lt(size, LONGEST) if short else sympy.Gt(size, MOST)] = None

    def require_below(self, number: Size, end: int) -> None:
        """32 bits count so many; where there are more, no kernel does."""
        if (now := evaluated(number, self.hints)) >= end:
            raise Unfusible(self.program.sinks[0].node, f"32 bits count too few of its parts: {now}")
        if not isinstance(number, int):
            self.guards[sympy.Lt(number, end)] = None

    def is_narrow(self, span: Size) -> bool:
        """Lanes are so close to each other as long as their stride is; another kernel serves longer ones."""
        if isinstance(span, int):
            return abs(span) < SPAN
        if not nonnegative(span) or evaluated(span, self.hints) >= SPAN:
            return False
        self.guards[sympy.Lt(span, SPAN)] = None
        return True
