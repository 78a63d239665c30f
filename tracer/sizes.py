"""Sizes of fakes as the IR writes them: ints and sympy's own functions over the symbols of the capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy import functions as torch_sympy

from ..ir.errors import LoweringError
from ..ir.text.text import plain_sympy
from .arithmetic import SYMBOLIC

_DIVISIONS = (torch_sympy.FloorDiv, torch_sympy.CleanDiv)


class Sizes:
    """Turns SymInts into expressions, simplified by what the guards say; a division proved exact becomes a fraction.

    FloorDiv(s0, 2)  ->  s0/2 where Mod(s0, 2) == 0 is known, s1 where it was compared with s1, else floor(s0/2)
    """

    def __init__(self) -> None:
        self._expressions: dict[tuple[sympy.Basic, int, int], Any] = {}
        self._equations: dict[int, tuple[set[sympy.Basic], dict[sympy.Basic, sympy.Basic]]] = {}

    def __call__(self, size: Any) -> Any:
        """int, float, bool or a symbolic number of torch -> the same as a number or a sympy expression."""
        if not isinstance(size, SYMBOLIC):
            return size
        if free_unbacked_symbols(size):
            raise LoweringError(f"the size {size} depends on the values of a tensor")
        expr, env = size.node.expr, size.node.shape_env
        divisible = getattr(env, "divisible", ())
        key = (expr, len(divisible), len(env.guards))
        if key not in self._expressions:
            whole, solutions = self._solved(env)
            known = _simplified(expr, whole.union(divisible), solutions)
            self._expressions[key] = _number(_rounded(plain_sympy(known)))
        return self._expressions[key]

    def _solved(self, env: Any) -> tuple[set[sympy.Basic], dict[sympy.Basic, sympy.Basic]]:
        """What the guards say: remainders that are 0, and what equations determine."""
        if len(env.guards) not in self._equations:
            exprs = [env.replace(g.expr) for g in env.guards]
            equations = [e for e in exprs if isinstance(e, sympy.Eq)]
            solved = solve_equations(equations, getattr(env, "age_of", _ageless))
            self._equations[len(env.guards)] = {r for e in equations for r in _no_remainder(e)}, solved
        return self._equations[len(env.guards)]

    def tree(self, item: Any) -> Any:
        """The same for every symbolic number in nested lists and tuples."""
        if isinstance(item, (list, tuple)):
            return tuple(self.tree(i) for i in item)
        return self(item)


def _ageless(expr: Any) -> int:
    return 0


def solve_equations(
    equations: Sequence[sympy.Eq], age_of: Callable[[Any], int] = _ageless
) -> dict[sympy.Basic, sympy.Basic]:
    """The divisions and symbols that the equations determine, each in terms of what is left, and is not younger.

    s1 // 2 == s0, s1 - s1 // 2 == s0                ->   s1 // 2: s0, s1: 2 * s0
    s0 * (s1 // s0) == s1, s2 * (s1 // s0) == s1     ->   s1 // s0: s1 / s0, s2: s0
    """
    solutions: dict[sympy.Basic, sympy.Basic] = {}
    for equation in equations:
        unknown = _solution(sympy.expand(_substitute(equation.lhs - equation.rhs, solutions)), age_of)
        if unknown is not None:
            solutions = {k: _replaced(v, dict([unknown])) for k, v in solutions.items()} | dict([unknown])
    return solutions


def _no_remainder(equation: sympy.Eq) -> Iterator[sympy.Basic]:
    """(s0 + 2) // 3 == s0 // 3  ->  s0 % 3: rounded up it is what it is rounded down"""
    for down, up in ((equation.lhs, equation.rhs), (equation.rhs, equation.lhs)):
        divisions = isinstance(down, torch_sympy.FloorDiv) and isinstance(up, torch_sympy.FloorDiv)
        if divisions and down.args[1] == up.args[1] and sympy.expand(up.args[0] - down.args[0] - up.args[1]) == -1:
            yield torch_sympy.Mod(*down.args)


def _solution(zero: sympy.Expr, age_of: Callable[[Any], int]) -> tuple[sympy.Basic, sympy.Basic] | None:
    """A division, or a symbol with coefficient 1 or -1, that `zero == 0` gives in terms of the rest."""
    terms = zero.as_coefficients_dict()
    divisions = [t for t in terms if isinstance(t, _DIVISIONS)]
    symbols = [t for t in terms if t.is_Symbol and abs(terms[t]) == 1]
    for unknown in sorted(divisions, key=str) + sorted(symbols, key=str):
        remainder = zero - terms[unknown] * unknown
        if not remainder.has(unknown) and remainder != 0 and age_of(remainder) <= age_of(unknown):
            return unknown, sympy.expand(-remainder / terms[unknown])
    return _factor(zero, age_of)


def _factor(zero: sympy.Expr, age_of: Callable[[Any], int]) -> tuple[sympy.Basic, sympy.Basic] | None:
    """A factor of two products of positive sizes that are equal, in terms of the others: s0 * d == s1 gives d."""
    terms = zero.as_ordered_terms()
    if len(terms) != 2 or not all(s.is_positive for s in zero.free_symbols):
        return None
    ratio = sympy.cancel(-terms[0] / terms[1])
    powers = ratio.as_powers_dict()
    divisions = [f for f in powers if isinstance(f, _DIVISIONS)]
    symbols = [f for f in powers if f.is_Symbol]
    for unknown in sorted(divisions, key=str) + sorted(symbols, key=str):
        found = sympy.cancel(unknown / ratio if powers[unknown] == 1 else unknown * ratio)
        exact = unknown in divisions or found.is_integer
        if abs(powers[unknown]) == 1 and exact and not found.has(unknown) and age_of(found) <= age_of(unknown):
            return unknown, found
    return None


def _simplified(expr: Any, divisible: Any, solutions: Mapping[sympy.Basic, sympy.Basic]) -> Any:
    """Divisions that were compared are what they were equal to; as a fraction no equation would know them again."""
    divisions = {k: v for k, v in solutions.items() if isinstance(k, _DIVISIONS)}
    return _substitute(_exact(_replaced(expr, divisions), divisible), solutions)


def _substitute(expr: Any, substitutions: Mapping[sympy.Basic, sympy.Basic]) -> Any:
    for _ in substitutions:
        expr = _replaced(expr, substitutions)
    return expr


def _replaced(expr: Any, substitutions: Mapping[sympy.Basic, sympy.Basic]) -> Any:
    if expr in substitutions:
        return substitutions[expr]
    return _of_args(expr, tuple(_replaced(a, substitutions) for a in expr.args))


def _of_args(expr: Any, args: tuple[Any, ...]) -> Any:
    """The expression with other arguments; of n // (n / 3) torch would make 1 // (1 / 3), which is no number to it."""
    if args == expr.args:
        return expr
    if isinstance(expr, _DIVISIONS):
        quotient = sympy.cancel(args[0] / args[1])
        if quotient.is_Rational or quotient.is_integer:
            return sympy.floor(quotient)
    return expr.func(*args)


def _exact(expr: Any, divisible: Any) -> Any:
    args = tuple(_exact(a, divisible) for a in expr.args)
    if isinstance(expr, _DIVISIONS) and _divides(expr, divisible):
        return args[0] / args[1]
    return _of_args(expr, args)


def _divides(division: Any, divisible: Any) -> bool:
    return isinstance(division, torch_sympy.CleanDiv) or torch_sympy.Mod(*division.args) in divisible


def _rounded(expr: Any) -> Any:
    """floor((n * m + n - 1) / n)  ->  m: how torch counts what arange(0, n * m, n) makes"""
    return expr.replace(sympy.floor, _floor) if expr.has(sympy.floor) else expr


def _floor(quotient: Any) -> Any:
    """A last part that is -1/n lowers what is whole by one."""
    terms = sympy.Add.make_args(sympy.expand(quotient))
    parts = [t for t in terms if not t.is_integer]
    inverse = -1 / parts[0] if len(parts) == 1 else sympy.S.Half
    if not (inverse.is_integer and inverse.is_positive):
        return sympy.floor(quotient)
    return sympy.Add(*(t for t in terms if t.is_integer)) - 1


def _number(expr: Any) -> Any:
    if expr.is_Integer:
        return int(expr)
    if expr in (sympy.true, sympy.false):
        return bool(expr)
    return float(expr) if expr.is_Float else expr


def hint_of(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size
