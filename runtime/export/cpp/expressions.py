"""Sizes as C++ text: whole numbers of 64 bits, all of them zero or more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy

from ..python.expressions import Expressions, Printer, closed


class CppExpressions(Expressions):
    """Prints sizes in C++."""

    def __init__(self, names: Mapping[sympy.Symbol, str | int]) -> None:
        super().__init__(names)
        self.printer = _CppPrinter(self.names)

    def define(self, name: str, size: Any) -> str:
        return f"const int64_t {super().define(name, size)};"

    def tuple(self, sizes: Sequence[Any]) -> str:
        """ "{M, 1024}" """
        return f"{{{', '.join(map(self.text, sizes))}}}"


class _CppPrinter(Printer):
    def _print_BooleanTrue(self, expr: Any) -> str:
        return "true"

    def _print_BooleanFalse(self, expr: Any) -> str:
        return "false"

    def ceiling(self, top: str, bottom: str) -> str:
        return f"cdiv({top}, {bottom})"

    def _quotient(self, top: str, bottom: str) -> str:
        return f"({closed(top)} / {closed(bottom)})" if bottom != "1" else top

    def _print_ModularIndexing(self, expr: Any) -> str:
        base, divisor, modulus = (closed(self._print(a)) for a in expr.args)
        return f"({base} / {divisor}) % {modulus}"

    def _listed(self, function: str, expr: Any) -> str:
        words = sorted(map(self._print, expr.args), key=lambda text: (len(text), text))
        return f"std::{function}<int64_t>({{{', '.join(words)}}})"

    def _print_And(self, expr: Any) -> str:
        return " && ".join(closed(self._print(a)) for a in expr.args)

    def _print_Or(self, expr: Any) -> str:
        return " || ".join(closed(self._print(a)) for a in expr.args)

    def _print_Not(self, expr: Any) -> str:
        return f"!({self._print(expr.args[0])})"
