"""Sizes as text: expressions over the symbols of a capture, with the names of an exported file, in Python or in C++."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.printing.precedence import PRECEDENCE
from sympy.printing.str import StrPrinter

from ....ir.types import Size

_RELATIONS = {"Eq": "==", "Ne": "!=", "Equality": "==", "Unequality": "!="}


@dataclass(frozen=True)
class Dialect:
    """A language's spelling of whole-number arithmetic, conditions, a tuple of sizes and the definition of a size."""

    divided: str
    """Rounded down."""
    rounded_up: str
    """The function that divides and rounds up."""
    extremum: str
    """Of min or max, with its arguments."""
    both: str
    either: str
    negation: str
    truth: tuple[str, str]
    """False and true."""
    definition: str
    sizes: str
    single: str
    """A tuple of one size."""
    extent: str
    """A tensor's size on an axis."""


PYTHON = Dialect(
    "//", "triton.cdiv", "{}({})", " and ", " or ", "not ({})", ("False", "True"), "{}", "({})", "({},)", "shape[{}]"
)
CPP = Dialect(
    "/", "cdiv", "std::{}<int64_t>({{{}}})", " && ", " || ", "!({})", ("false", "true"), "const int64_t {};",
    "{{{}}}", "{{{}}}", "size({})",
)  # fmt: skip
"""Whole numbers of 64 bits, all of them zero or more."""


class Expressions:
    """Prints sizes. `names`: a name in the file, or a number, for each symbol."""

    def __init__(self, names: Mapping[sympy.Symbol, str | int], dialect: Dialect = PYTHON) -> None:
        self.dialect = dialect
        self.numbers = {s: sympy.Integer(n) for s, n in names.items() if isinstance(n, int)}
        self.names = {s: n for s, n in names.items() if isinstance(n, str)}
        self.printer = Printer(self.names, dialect)
        self.variables: dict[Any, sympy.Symbol] = {}

    def settled(self, size: Any) -> Any:
        """The expression with every number and every variable put in that is known."""
        if not isinstance(size, sympy.Basic):
            return size
        return size.xreplace(self.numbers).xreplace(self.variables)

    def define(self, name: str, size: Any) -> str:
        """The line that binds a variable to an expression; from here on the variable stands for it."""
        line = self.dialect.definition.format(f"{name} = {self.text(size)}")
        symbol = sympy.Symbol(name, integer=True, nonnegative=True)
        self.variables[size.xreplace(self.numbers)] = symbol
        self.names[symbol] = name
        return line

    @contextmanager
    def branch(self) -> Iterator[None]:
        """Definitions within are for what stands within alone."""
        before = dict(self.variables)
        yield
        self.variables = before

    def is_defined(self, size: Any) -> bool:
        """True where a number, a symbol or a variable stands for the whole of it."""
        settled = self.settled(size)
        return not isinstance(settled, sympy.Basic) or settled.is_Atom

    def text(self, size: Size | sympy.Basic) -> str:
        """ "2 * M", say: an int, or a condition. Raises KeyError for a symbol without a name."""
        return str(self.printer.doprint(self.settled(size))) if isinstance(size, sympy.Basic) else str(size)

    def tuple(self, sizes: Sequence[Size]) -> str:
        """ "(M, 1024)" in Python, "{M, 1024}" in C++."""
        inner = ", ".join(map(self.text, sizes))
        return (self.dialect.single if len(sizes) == 1 else self.dialect.sizes).format(inner)

    def conjunction(self, conditions: Sequence[sympy.Basic]) -> str:
        """All of them, one after the other."""
        several = len(conditions) > 1
        texts = [bracketed(self.text(c)) if several and isinstance(c, sympy.Or) else self.text(c) for c in conditions]
        return self.dialect.both.join(texts)


# ------------------------------------------------------------------ one expression
class Printer(StrPrinter):  # type: ignore[misc]  # sympy has no types
    """Whole-number arithmetic: quotients are exact or rounded down. A rule of the table below for each kind of node."""

    def __init__(self, names: Mapping[sympy.Symbol, str], dialect: Dialect) -> None:
        super().__init__()
        self.names, self.dialect = names, dialect

    def _print(self, expr: Any, **settings: Any) -> str:
        """Print by the rule of the first class above the expression's that has one here, or by sympy's own."""
        for cls in type(expr).__mro__:
            if (rule := RULES.get(cls.__name__)) is not None:
                return rule(self, expr)
            if hasattr(StrPrinter, f"_print_{cls.__name__}"):
                break
        return str(super()._print(expr, **settings))

    def operands(self, expr: Any) -> list[str]:
        """The arguments, each closed."""
        return [bracketed(self._print(a)) for a in expr.args]

    def quotient(self, top: Any, bottom: Any) -> str:
        """Rounded down."""
        above, below = self._print(top), self._print(bottom)
        return f"({bracketed(above)} {self.dialect.divided} {bracketed(below)})" if below != "1" else above

    def quotient_up(self, top: Any, bottom: Any) -> str:
        """Rounded up."""
        return f"{self.dialect.rounded_up}({self._print(top)}, {self._print(bottom)})"


def _fraction(expr: Any) -> tuple[Any, Any]:
    return sympy.fraction(sympy.together(expr))  # type: ignore[no-any-return]


def _product(to: Printer, expr: Any) -> str:
    top, bottom = sympy.fraction(expr)
    if bottom != 1:
        return to.quotient(top, bottom)
    return " * ".join(bracketed(to._print(f)) for f in expr.as_ordered_factors())


def _floor_division(to: Printer, expr: Any) -> str:
    """A quotient in torch's own spelling, "(M//2)"."""
    base, divisor = (to.parenthesize(a, PRECEDENCE["Atom"] - 0.5) for a in expr.args)
    return f"({base}{to.dialect.divided}{divisor})"


def _modular_indexing(to: Printer, expr: Any) -> str:
    base, divisor, modulus = to.operands(expr)
    return f"({base} {to.dialect.divided} {divisor}) % {modulus}"


def _extremum(name: str) -> Callable[[Printer, Any], str]:
    def rule(to: Printer, expr: Any) -> str:
        words = sorted(map(to._print, expr.args), key=lambda text: (len(text), text))
        return to.dialect.extremum.format(name, ", ".join(words))

    return rule


def _choice(to: Printer, expr: Any) -> str:
    """A number by a condition, or another: Python's own words."""
    (first, condition), (otherwise, _) = expr.args
    return f"{to._print(first)} if {to._print(condition)} else {to._print(otherwise)}"


def _relation(to: Printer, expr: Any) -> str:
    sign = _RELATIONS.get(expr.rel_op, _RELATIONS.get(type(expr).__name__, expr.rel_op))
    return f"{to._print(expr.lhs)} {sign} {to._print(expr.rhs)}"


RULES: dict[str, Callable[[Printer, Any], str]] = {
    "Symbol": lambda to, expr: to.names[expr],
    "Rational": lambda to, expr: str(expr.p) if expr.q == 1 else f"{expr.p} / {expr.q}",
    "Mul": _product,
    "Mod": lambda to, expr: " % ".join(to.operands(expr)),
    "PythonMod": lambda to, expr: " % ".join(to.operands(expr)),
    "floor": lambda to, expr: to.quotient(*_fraction(expr.args[0])),
    "ceiling": lambda to, expr: to.quotient_up(*_fraction(expr.args[0])),
    "FloorDiv": _floor_division,
    "IntTrueDiv": lambda to, expr: to.quotient(*expr.args),
    "CeilDiv": lambda to, expr: to.quotient_up(*expr.args),
    "ModularIndexing": _modular_indexing,
    "Min": _extremum("min"),
    "Max": _extremum("max"),
    "Piecewise": _choice,
    "Relational": _relation,
    "And": lambda to, expr: to.dialect.both.join(to.operands(expr)),
    "Or": lambda to, expr: to.dialect.either.join(to.operands(expr)),
    "Not": lambda to, expr: to.dialect.negation.format(to._print(expr.args[0])),
    "BooleanTrue": lambda to, expr: to.dialect.truth[1],
    "BooleanFalse": lambda to, expr: to.dialect.truth[0],
}
"""By the name of sympy's or torch's class; what is missing (sums, integers) is printed as sympy does."""


def bracketed(text: str) -> str:
    """The text in brackets, where it is more than one word or one call."""
    is_closed = text.isidentifier() or text.isdigit() or (text.endswith(")") and _opens_at_first_bracket(text))
    return text if is_closed else f"({text})"


def _opens_at_first_bracket(text: str) -> bool:
    """True where the last bracket closes the first one, with nothing but a name before it."""
    at = text.index("(")
    depth = 0
    for i, letter in enumerate(text[at:], at):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return i == len(text) - 1 and (at == 0 or text[:at].replace(".", "_").isidentifier())
    return False
