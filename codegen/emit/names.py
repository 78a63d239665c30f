"""Names for the emitted text: the user's own where there are any, none twice, none that Python or Triton owns.

Sizes have names, too: numbers, constants, scalar arguments; and the conditions under which the text is right.
"""

from __future__ import annotations

import keyword
import re
import string
from collections.abc import Iterable, Iterator

import sympy

from ...ir.errors import Unfusible
from ...ir.switches import is_on
from ...ir.types import Size
from ..program.axes import Program
from ..program.sizes import Hints, evaluate_size, nonnegative, tidy
from ..schedule.alignment import GROUP
from .statements import Expr, literal, name

LABELS = {
    "PROGRAMS", "ITEMS", "TOTAL", "GROUP", "GROUPS", "FAN", "STRIPS", "PRECISION",
    *(f"{kind}_{letter}" for kind in ("BLOCK", "OWN") for letter in string.ascii_uppercase),
}  # fmt: skip
"""The constants of kernels, which have the same names in all of them."""
RESERVED = frozenset(keyword.kwlist) | {
    "tl", "triton", "libdevice", "range", "float", "int", "bool", "min", "max", "sum", "abs", "pow", "print", "len",
    "constexpr", "static_range", "cdiv", "minimum", "maximum", "self",
}  # fmt: skip
MULTIPLE = "MULTIPLE_"
"""Before a length: the constant that it is a multiple of."""
WIDTH = 16
"""Elements of the widest access, where they are bytes."""
SPAN = 1 << 29
"""Elements between the first and last lane of a tile, below which 32 bits count them in bytes, too."""
MOST = (1 << 31) - 1
LONGEST = MOST - (1 << 17)
"""Lengths from here to MOST have no kernel: with a block more they leave 32 bits, in which they are passed."""


def identifier(text: str | None) -> str:
    """The text as a plain ASCII identifier, or "" where nothing is left of it."""
    word = re.sub(r"[^0-9A-Za-z_]+", "_", text or "").strip("_")
    return f"v{word}" if word[:1].isdigit() else word


class Names:
    """Hands out each name once: x, x_2, x_3 .."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._used = set(RESERVED) | set(reserved)
        self._within: dict[str, int] = {}  # of names that a closed block has: the level around it

    def fresh(self, wish: str | None, otherwise: str = "v", level: int | None = None) -> str:
        """A name of its own. level: of the scope that has it; further out than a block it may stand before that."""
        base = identifier(wish) or otherwise
        label, number = base, 2
        while label in self._used or (level is not None and level < self._within.get(label, 0)):
            label, number = f"{base}_{number}", number + 1
        self._used.add(label)
        return label

    def __iter__(self) -> Iterator[str]:
        return iter(self._used)

    def release(self, texts: Iterable[str], level: int = 0) -> None:
        """Names of a block that is closed: its neighbours, and blocks within these, may use them again."""
        texts = set(texts)
        self._used -= texts
        self._within |= {text: max(level, self._within.get(text, 0)) for text in texts}

    def is_used(self, text: str) -> bool:
        return text in self._used


class SizeArguments:
    """The scalar arguments and constants of one kernel, and its guards.

    `wide`: names of scalars whose divisibility makes accesses wide: by `width`, the elements of the widest access.
    """

    def __init__(self, program: Program, hints: Hints, names: Names) -> None:
        self.program, self.hints, self.names = program, hints, names
        self.scalars: dict[Size, str] = {}
        self.constants: dict[str, int | str] = {}
        self.guards: dict[sympy.Basic, None] = {}
        self.wide: set[str] = set()
        self.width = GROUP // min((t.itemsize for t in program.traffic()), default=1)

    def text(self, size: Size, wish: str = "size") -> Expr:
        """A size as text: a number, the name of an axis's size, or a scalar argument."""
        size = tidy(size)
        if isinstance(size, int):
            constant = next((n for n, v in self.constants.items() if v == size and v > 16 and len(n) == 1), None)
            return name(constant) if constant else literal(size)
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

    def is_multiple(self, size: Size) -> bool:
        """True of a stride that is, and stays, a multiple of the width."""
        if isinstance(size, int):
            return size % self.width == 0
        return is_on("multiples") and evaluate_size(size, self.hints) % self.width == 0

    def stays_multiple(self, size: Size, block: int, largest: int) -> bool:
        """True of a size that blocks divide; also of one that blocks up to the largest divide now, by a guard.

        In a loop, a mask that changes is held for each turn under way, and is asked for each element that is summed.
        """
        if isinstance(size, int):
            return size % block == 0
        if not is_on("multiples") or block > largest or evaluate_size(size, self.hints) % block:
            return False
        self.guards[sympy.Eq(sympy.Mod(size, block), 0)] = None
        return True

    def require_countable(self, size: Size) -> None:
        """Lengths that are counted in blocks: 32 bits hold a block more, or they are 64 bits wide as they are."""
        current = evaluate_size(size, self.hints)
        if LONGEST <= current <= MOST:
            raise Unfusible(self.program.sinks[0].node, f"a length of {current} is the end of what 32 bits count")
        if not isinstance(size, int):
            is_short = current < LONGEST
            self.guards[sympy.Lt(size, LONGEST) if is_short else sympy.Gt(size, MOST)] = None

    def require_at_most(self, size: Size, block: int) -> None:
        """A block that holds all of a length that is no number holds the shorter ones, too."""
        if not isinstance(size, int):
            self.guards[sympy.Le(size, block)] = None

    def require_below(self, number: Size, end: int) -> None:
        """32 bits count so many; where there are more, no kernel does."""
        if (current := evaluate_size(number, self.hints)) >= end:
            raise Unfusible(self.program.sinks[0].node, f"32 bits count too few of its parts: {current}")
        if not isinstance(number, int):
            self.guards[sympy.Lt(number, end)] = None

    def is_narrow(self, span: Size) -> bool:
        """Lanes are so close to each other as long as their stride is; another kernel serves longer ones."""
        if isinstance(span, int):
            return abs(span) < SPAN
        if not nonnegative(span) or evaluate_size(span, self.hints) >= SPAN:
            return False
        self.guards[sympy.Lt(span, SPAN)] = None
        return True
