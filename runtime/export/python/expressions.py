"""Sizes as Python text: expressions over the symbols of a capture, printed with the names of an exported module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
from sympy.printing.str import StrPrinter

from ....ir.types import Size

_RELATIONS = {"Eq": "==", "Ne": "!=", "Equality": "==", "Unequality": "!="}


class Expressions:
    """Prints sizes. `names`: a Python name, or a number, for each symbol."""

    def __init__(self, names: Mapping[sympy.Symbol, str | int]) -> None:
        self.numbers = {s: sympy.Integer(n) for s, n in names.items() if isinstance(n, int)}
        self.names = {s: n for s, n in names.items() if isinstance(n, str)}
        self.printer = Printer(self.names)
        self.variables: dict[Any, sympy.Symbol] = {}

    def settled(self, size: Any) -> Any:
        """The expression with every number and every variable put in that is known."""
        if not isinstance(size, sympy.Basic):
            return size
        return size.xreplace(self.numbers).xreplace(self.variables)

    def define(self, name: str, size: Any) -> str:
        """The line that binds a variable to an expression; from here on the variable stands for it."""
        line = f"{name} = {self.text(size)}"
        symbol = sympy.Symbol(name, integer=True, nonnegative=True)
        self.variables[size.xreplace(self.numbers)] = symbol
        self.names[symbol] = name
        return line

    def is_defined(self, size: Any) -> bool:
        """Whether a number, a symbol or a variable stands for the whole of it."""
        settled = self.settled(size)
        return not isinstance(settled, sympy.Basic) or settled.is_Atom

    def text(self, size: Size | sympy.Basic) -> str:
        """ "2 * M", say: an int, or a condition, in Python. Raises KeyError for a symbol without a name."""
        return str(self.printer.doprint(self.settled(size))) if isinstance(size, sympy.Basic) else str(size)

    def tuple(self, sizes: Sequence[Size]) -> str:
        """ "(M, 1024)" """
        inner = ", ".join(map(self.text, sizes))
        return f"({inner},)" if len(sizes) == 1 else f"({inner})"


class Printer(StrPrinter):  # type: ignore[misc]  # sympy has no types
    """Whole-number arithmetic: quotients are exact or rounded down, `ceiling` goes through triton.cdiv."""

    def __init__(self, names: Mapping[sympy.Symbol, str]) -> None:
        super().__init__()
        self.names = names

    def _print_Symbol(self, expr: sympy.Symbol) -> str:
        return self.names[expr]

    def _print_ceiling(self, expr: Any) -> str:
        return self.ceiling(*self._parts(expr.args[0]))

    def ceiling(self, top: str, bottom: str) -> str:
        """A quotient rounded up."""
        return f"triton.cdiv({top}, {bottom})"

    def _print_floor(self, expr: Any) -> str:
        return self._quotient(*self._parts(expr.args[0]))

    def _parts(self, expr: Any) -> tuple[str, str]:
        top, bottom = sympy.fraction(sympy.together(expr))
        return self._print(top), self._print(bottom)

    def _quotient(self, top: str, bottom: str) -> str:
        return f"({closed(top)} // {closed(bottom)})" if bottom != "1" else top

    def _print_Mul(self, expr: Any) -> str:
        top, bottom = sympy.fraction(expr)
        if bottom != 1:
            return self._quotient(self._print(top), self._print(bottom))
        return " * ".join(closed(self._print(f)) for f in expr.as_ordered_factors())

    def _print_Rational(self, expr: Any) -> str:
        return str(expr.p) if expr.q == 1 else f"{expr.p} / {expr.q}"

    def _print_Mod(self, expr: Any) -> str:
        return " % ".join(closed(self._print(a)) for a in expr.args)

    _print_PythonMod = _print_Mod

    def _print_FloorDiv(self, expr: Any) -> str:
        return self._quotient(self._print(expr.args[0]), self._print(expr.args[1]))

    _print_CleanDiv = _print_IntTrueDiv = _print_FloorDiv

    def _print_CeilDiv(self, expr: Any) -> str:
        return self.ceiling(self._print(expr.args[0]), self._print(expr.args[1]))

    def _print_ModularIndexing(self, expr: Any) -> str:
        base, divisor, modulus = (closed(self._print(a)) for a in expr.args)
        return f"({base} // {divisor}) % {modulus}"

    def _listed(self, function: str, expr: Any) -> str:
        return f"{function}({', '.join(sorted(map(self._print, expr.args), key=lambda text: (len(text), text)))})"

    def _print_Min(self, expr: Any) -> str:
        return self._listed("min", expr)

    def _print_Max(self, expr: Any) -> str:
        return self._listed("max", expr)

    def _print_Relational(self, expr: Any) -> str:
        sign = _RELATIONS.get(expr.rel_op, _RELATIONS.get(type(expr).__name__, expr.rel_op))
        return f"{self._print(expr.lhs)} {sign} {self._print(expr.rhs)}"

    def _print_And(self, expr: Any) -> str:
        return " and ".join(closed(self._print(a)) for a in expr.args)

    def _print_Or(self, expr: Any) -> str:
        return " or ".join(closed(self._print(a)) for a in expr.args)

    def _print_Not(self, expr: Any) -> str:
        return f"not ({self._print(expr.args[0])})"


def closed(text: str) -> str:
    """In brackets, where it is more than one word or one call."""
    whole = text.isidentifier() or text.isdigit() or (text.endswith(")") and _opens_at_first_bracket(text))
    return text if whole else f"({text})"


def _opens_at_first_bracket(text: str) -> bool:
    """Whether the last bracket closes the first one, with nothing but a name before it."""
    at = text.index("(")
    depth = 0
    for i, letter in enumerate(text[at:], at):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return i == len(text) - 1 and (at == 0 or text[:at].replace(".", "_").isidentifier())
    return False
