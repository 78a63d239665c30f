"""Sizes of which a loop has a step for so many each: `range(0, T, 2)`, chunks of 64 steps, `if t % 4 == 0`.

Short lengths that are any numbers would be no lengths that such a method takes, or would not repeat.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

TURNS = (2, 4, 3)
"""What a loop over a size itself may do in turns of."""


@dataclass(frozen=True)
class Multiples:
    """Sizes that are `of` for each step of a loop, and `more`."""

    of: int = 1
    more: int = 0

    def size(self, length: int) -> int:
        """That of a loop of so many steps."""
        return self.of * length + self.more

    def value(self, length: int, constant: int, size: Any) -> Any:
        """So many times the steps of a loop over this size, and a constant: a number, or an expression."""
        whole, rest = divmod(length, self.of)
        terms = [(whole, size)] if whole else []
        if rest:
            terms.append((rest, FloorDiv(size, self.of) if isinstance(size, sympy.Basic) else size // self.of))
        scaled = [term if factor == 1 else term * factor for factor, term in terms]
        constant -= whole * self.more
        # Each operation on a symbolic number is a node of the graph: none is made for nothing
        return functools.reduce(operator.add, [*scaled, constant] if constant or not scaled else scaled)

    def assumption(self, size: sympy.Symbol) -> sympy.Basic:
        """What is true of such a size."""
        return sympy.Eq(Mod(size, self.of), self.more)


EACH = Multiples()
"""A step for each."""


def multiples_of(expr: sympy.Expr, size: int, may_be_in_turns: bool) -> Iterator[Multiples]:
    """Those that this size may be one of, where a number like this of it is that of a loop's steps."""
    for of in _divisors(expr) or (TURNS if may_be_in_turns else ()):
        yield Multiples(of, size % of)


def are_parts(expr: sympy.Expr, size: int, turns: int) -> bool:
    """Whether a loop has a step for each part of the size, of several places, and perhaps one for the rest."""
    return any(turns in (size // of, -(-size // of)) for of in _divisors(expr))


def _divisors(expr: sympy.Expr) -> list[int]:
    return sorted({int(d.args[1]) for d in expr.atoms(FloorDiv) if d.args[1].is_Integer and d.args[1] > 1})
