"""A float as a function of a loop's step and length."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..affine import Affine

ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow)
FUNCTIONS = (math.sqrt, math.exp, math.cos)


@dataclass(frozen=True)
class Formula:
    """What Python computes: an operation of `operator` or `math` on formulas, whole numbers and constants."""

    call: Callable[..., Any]
    args: tuple[Any, ...]

    def at(self, t: int, length: int) -> Any:
        """Its value; raises what Python does."""
        return self.call(*(a.at(t, length) if isinstance(a, Formula | Affine) else a for a in self.args))

    def built(self, number: Callable[[Affine], Any], called: Callable[[Any, tuple[Any, ...]], Any]) -> Any:
        """The same with other things for whole numbers, and other calls."""
        return called(self.call, tuple(_built(a, number, called) for a in self.args))

    def reads_length(self) -> bool:
        """Whether the length is in it."""
        return any(a.reads_length() if isinstance(a, Formula) else _has_length(a) for a in self.args)

    def calls_functions(self) -> bool:
        """Whether a function of `math` is in it, which takes no symbol."""
        return self.call in FUNCTIONS or any(isinstance(a, Formula) and a.calls_functions() for a in self.args)


def _built(argument: Any, number: Any, called: Any) -> Any:
    if isinstance(argument, Formula):
        return argument.built(number, called)
    return number(argument) if isinstance(argument, Affine) else argument


def _has_length(argument: Any) -> bool:
    return isinstance(argument, Affine) and argument.length != 0
