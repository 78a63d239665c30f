"""Sizes of fakes as the IR writes them: ints and sympy's own functions over the symbols of the capture."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy import functions as torch_sympy

from ..ir.errors import LoweringError
from ..ir.text import plain

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_DIVISIONS = (torch_sympy.FloorDiv, torch_sympy.CleanDiv)


class Sizes:
    """Turns SymInts into expressions; a division that a guard proved exact becomes a fraction.

    FloorDiv(s0, 2)  ->  s0/2 where Mod(s0, 2) == 0 is known, else floor(s0/2)
    """

    def __init__(self) -> None:
        self._known: dict[tuple[sympy.Basic, int], Any] = {}

    def __call__(self, size: Any) -> Any:
        """int, float, bool or a symbolic number of torch -> the same as a number or a sympy expression."""
        if not isinstance(size, SYMBOLIC):
            return size
        if free_unbacked_symbols(size):
            raise LoweringError(f"the size {size} depends on the values of a tensor")
        expr, facts = size.node.expr, _divisible(size.node.shape_env)
        key = (expr, len(facts))
        if key not in self._known:
            self._known[key] = _number(plain(_exact(expr, facts)))
        return self._known[key]

    def tree(self, item: Any) -> Any:
        """The same for every symbolic number in nested lists and tuples."""
        if isinstance(item, (list, tuple)):
            return tuple(self.tree(i) for i in item)
        return self(item)


def _divisible(shape_env: Any) -> Any:
    return getattr(shape_env, "divisible", ())


def _exact(expr: Any, divisible: Any) -> Any:
    args = tuple(_exact(a, divisible) for a in expr.args)
    if isinstance(expr, _DIVISIONS) and _divides(expr, divisible):
        return args[0] / args[1]
    return expr if args == expr.args else expr.func(*args)


def _divides(division: Any, divisible: Any) -> bool:
    return isinstance(division, torch_sympy.CleanDiv) or torch_sympy.Mod(*division.args) in divisible


def _number(expr: Any) -> Any:
    if expr.is_Integer:
        return int(expr)
    if expr in (sympy.true, sympy.false):
        return bool(expr)
    return float(expr) if expr.is_Float else expr
