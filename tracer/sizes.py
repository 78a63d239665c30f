"""Sizes of fakes as the IR writes them: ints and sympy's own functions over the symbols of the capture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy import functions as torch_sympy

from ..ir.errors import LoweringError
from ..ir.text.text import plain_sympy
from .arithmetic import SYMBOLIC

_DIVISIONS = (torch_sympy.FloorDiv, torch_sympy.CleanDiv)
_REMAINDERS = (torch_sympy.Mod, torch_sympy.PythonMod)


class Sizes:
    """Turns SymInts into expressions, simplified by what the guards say; a division proved exact becomes a fraction.

    FloorDiv(s0, 2)  ->  s0/2 where Mod(s0, 2) == 0 is known, s1 where it was compared with s1, else floor(s0/2)
    """

    def __init__(self) -> None:
        self._expressions: dict[tuple[sympy.Basic, int, int], Any] = {}
        self._equations: dict[int, tuple[set[sympy.Basic], dict[sympy.Basic, sympy.Basic]]] = {}
        self._multiples: dict[int, dict[sympy.Basic, int]] = {}

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
            rounded = _rounded(plain_sympy(known))
            self._expressions[key] = _number(_of_multiples(rounded, self._multiples[len(env.guards)]))
        return self._expressions[key]

    def _solved(self, env: Any) -> tuple[set[sympy.Basic], dict[sympy.Basic, sympy.Basic]]:
        """What the guards say: remainders that are 0, and what equations determine."""
        if len(env.guards) not in self._equations:
            exprs = [env.replace(g.expr) for g in env.guards]
            equations = [e for e in exprs if isinstance(e, sympy.Eq)]
            solved = solve_equations(equations, getattr(env, "age_of", _ageless))
            self._equations[len(env.guards)] = {r for e in equations for r in _no_remainder(e)}, solved
            self._multiples[len(env.guards)] = _multiples(equations, getattr(env, "divisible", ()))
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


def _multiples(equations: Sequence[sympy.Eq], remainders: Iterable[sympy.Basic] = ()) -> dict[sympy.Basic, int]:
    """By what sizes can be divided: what equations of divisions say, and remainders that are 0, until nothing is new.

    (s0 + 1) // 2 == s0 // 2, ((s0 + 1) // 2 + 1) // 2 == (s0 + 1) // 4         ->  s0: 4
    s0 == 3 * ((s0 + 2) // 3), ((s0 + 2) // 3) % 16 == 0                        ->  s0: 48
    """
    divided = [e for e in equations if e.has(*_DIVISIONS, *_REMAINDERS)]
    facts = [tuple(map(plain_sympy, e.args)) for e in divided if not e.has(*_REMAINDERS)]
    zeros = [r for e in divided for r in e.args if isinstance(r, _REMAINDERS) and sympy.S.Zero in e.args]
    exact = [plain_sympy(r.args[0]) / r.args[1] for r in (*zeros, *remainders) if r.args[1].is_Integer]
    found: dict[sympy.Basic, int] = {}
    before = None
    while before != found:
        before = dict(found)
        for whole in exact:
            _learn(found, _in_parts(whole, found))
        for sides in facts:
            parts = [_in_parts(side, found) for side in sides]
            for whole in (*_whole_numbers(*parts), *_whole_numbers(*parts[::-1])):
                _learn(found, whole)
    return found


def _whole_numbers(one: Any, other: Any) -> Iterator[Any]:
    """What an equation says is whole: n/q of k * floor(..) == k * n/q, and of floor((n + q - 1)/q) == floor(n/q)."""
    factor, rounded = one.as_coeff_Mul()
    if not isinstance(rounded, sympy.floor):
        return
    yield other / factor
    if isinstance(other, sympy.floor) and factor == 1:
        more, part = sympy.expand(other.args[0] - rounded.args[0]), rounded.args[0]
        if more.is_Rational and more == 1 - sympy.Rational(1, more.q) and sympy.expand(part * more.q).is_integer:
            yield part


def _learn(found: dict[sympy.Basic, int], whole: Any) -> None:
    """n * p/q + k is whole: n can be divided by q."""
    constant, rest = sympy.expand(whole).as_coeff_Add()
    share, symbol = rest.as_coeff_Mul()
    if symbol.is_Symbol and constant.is_Integer and share.is_Rational and share.q > 1:
        found[symbol] = found.get(symbol, 1) * int(share.q)


def _in_parts(expr: Any, multiples: Mapping[sympy.Basic, int]) -> Any:
    """The expression, where a symbol that is known to be so many parts stands for one of them."""
    parts = expr.xreplace({symbol: symbol * n for symbol, n in multiples.items()})
    return parts.replace(sympy.floor, lambda quotient: sympy.floor(_without_idle_part(sympy.expand(quotient))))


def _without_idle_part(quotient: Any) -> Any:
    """n/2 + 1/4  ->  n/2: less than one part more"""
    constant, rest = quotient.as_coeff_Add()
    shares = [share for _, share in rest.as_coefficients_dict().items()] if rest.is_polynomial() else []
    if not shares or not all(s.is_Rational for s in (constant, *shares)):
        return quotient
    unit = math.lcm(*(int(s.q) for s in shares))
    return rest + sympy.floor(constant * unit) / unit


def _of_multiples(expr: Any, multiples: Mapping[sympy.Basic, int]) -> Any:
    """floor(floor((n + 1)/2)/2)  ->  n/4, where n can be divided by 4"""
    if not multiples or not expr.has(sympy.floor):
        return expr
    return _in_parts(expr, multiples).xreplace({symbol: symbol / n for symbol, n in multiples.items()})


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
    """What is whole as a whole; a last part that is -1/n lowers it by one."""
    terms = sympy.Add.make_args(sympy.expand(quotient))
    parts = [t for t in terms if not t.is_integer]
    if not parts:
        return sympy.Add(*terms)
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


def agree_on_factors(env: Any) -> bool:
    """Factors of products that a guard says are equal are equal from now on, where they are at present; if any is new.

    s1 * s2 == s4 * s5  ->  s1 == s4, s2 == s5      no axis of one is known to be an axis of the other before
    """
    known = len(env.guards)
    for equation in [env.replace(g.expr) for g in env.guards]:
        if isinstance(equation, sympy.Eq) and (pairs := _factors_alike(equation, _hints(env))):
            for pair in pairs:
                env.evaluate_expr(sympy.Eq(*pair))
    return len(env.guards) > known


def _factors_alike(equation: sympy.Eq, hints: Mapping[sympy.Basic, Any]) -> list[tuple[sympy.Basic, ...]]:
    """The symbols of both sides of which the same number stands on either, in order; none where others are left."""
    powers = sympy.cancel(equation.lhs / equation.rhs).as_powers_dict()
    if not all(f in hints and n.is_Integer for f, n in powers.items()):
        return []
    sides = ([f for f, n in powers.items() for _ in range(sign * int(n))] for sign in (1, -1))
    arguments = list(hints)  # of sizes that are one number here, the first axis of each goes with the first
    left, right = (sorted(side, key=lambda s: (hints[s], arguments.index(s))) for side in sides)
    return list(zip(left, right, strict=True)) if [hints[s] for s in left] == [hints[s] for s in right] else []


def _hints(env: Any) -> Mapping[sympy.Basic, Any]:
    """The sizes of the call that is traced, under the name that this torch has for them."""
    found: Mapping[sympy.Basic, Any] = getattr(env, "backed_var_to_val", None) or env.var_to_val
    return found


def hint_of(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size


# ------------------------------------------------------------------------------------------- while a trace is made
# A reshape into groups divides a size. torch, which keeps the remainder apart from the quotient, writes quotients of
# quotients from there on, and takes tens of milliseconds for each question about them.
Divisors = tuple[tuple[sympy.Symbol, int], ...]
"""Sizes, each with a number that divides it."""


def multiples_in(question: sympy.Basic, answer: bool) -> dict[sympy.Symbol, int]:
    """{C: 4} where the answer says that 4 divides C.

    C mod 4 = 0, or N H W = 16 N (H // 4) (W // 4), what a view of windows is asked: no factor may be less.
    """
    if not isinstance(question, sympy.Eq if answer else sympy.Ne):
        return {}
    left, right = question.lhs, question.rhs
    if isinstance(left, torch_sympy.Mod) and right == 0:
        size, divisor = left.args
        return {size: int(divisor)} if size.is_Symbol and divisor.is_Integer else {}
    return _in_equal_products(left, right) or _in_equal_products(right, left)


def _in_equal_products(whole: sympy.Expr, parted: sympy.Expr) -> dict[sympy.Symbol, int]:
    if whole.has(torch_sympy.FloorDiv) or not all(s.is_positive for s in whole.free_symbols):
        return {}
    parts = [f for f in sympy.Mul.make_args(parted) if isinstance(f, torch_sympy.FloorDiv)]
    if not parts or not all(f.args[0].is_Symbol and f.args[1].is_Integer for f in parts):
        return {}
    at_most = sympy.Mul(*(f.args[0] / f.args[1] for f in parts), parted / sympy.Mul(*parts))
    return {f.args[0]: int(f.args[1]) for f in parts} if at_most == whole else {}


@lru_cache(maxsize=4096)
def with_whole_parts(expr: sympy.Expr, divisors: Divisors) -> sympy.Expr:
    """4 * B * (C // 4)  ->  B * C   and (4 * B * (C // 4)) // C  ->  B,  for (C, 4)"""
    if not expr.has(torch_sympy.FloorDiv):
        return expr
    args = tuple(with_whole_parts(a, divisors) for a in expr.args)
    expr = expr if args == expr.args else expr.func(*args)
    if expr.is_Mul:
        return _product(expr, dict(divisors))
    return _quotient(expr, dict(divisors)) if isinstance(expr, torch_sympy.FloorDiv) else expr


def _product(expr: sympy.Expr, multiples: dict[sympy.Symbol, int]) -> sympy.Expr:
    """12 * (C // 4)  ->  3 * C"""
    number, rest = expr.as_coeff_Mul()
    for factor in sympy.Mul.make_args(rest):
        if not isinstance(factor, torch_sympy.FloorDiv) or factor.args[0] not in multiples:
            continue
        size, divisor = factor.args
        if divisor.is_Integer and multiples[size] % divisor == 0 and number % divisor == 0:
            number, rest = number / divisor, size * (rest / factor)
    return number * rest


def _quotient(expr: sympy.Expr, multiples: dict[sympy.Symbol, int]) -> sympy.Expr:
    """Of C = 4 c, where nothing is left to divide then."""
    known = {s: n for s, n in multiples.items() if s in expr.free_symbols}
    parts = {s: sympy.Dummy(s.name, integer=True, positive=True) for s in known}
    divided = expr.xreplace({s: n * parts[s] for s, n in known.items()})
    if not known or not divided.is_polynomial(*divided.free_symbols):
        return expr
    whole = divided.xreplace({part: torch_sympy.FloorDiv(s, known[s]) for s, part in parts.items()})
    return sympy.Add(*(_product(t, multiples) for t in sympy.Add.make_args(whole)))
