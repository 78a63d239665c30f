"""A size C / 32 is whole, so C = 32 c for a size c of its own: with c in place of C, all arithmetic is on integers.

The kernels are given back in the symbols of the graph: an argument c becomes C / 32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy

from ...ir import Graph
from ...ir.types import Size, simplify_size
from ..kernel import Buffer, Kernel, Kernels, Pointer, Scalar
from ..program.sizes import Hints


@dataclass(frozen=True)
class Quotients:
    """`whole`: {C: 32 c}."""

    whole: Mapping[sympy.Symbol, sympy.Expr]

    @staticmethod
    def of(graph: Graph) -> Quotients:
        """The symbols of which a part is a size in the graph."""
        parts: dict[sympy.Symbol, int] = {}
        for size in (n for v in (*graph.inputs, *graph.order()) for t in v.avals for n in t.shape):
            if not isinstance(size, int) and (part := _part(size)) is not None:
                symbol, divisor = part
                parts[symbol] = math.lcm(divisor, parts.get(symbol, 1))
        return Quotients({s: d * sympy.Symbol(f"{s}_{d}", **s.assumptions0) for s, d in parts.items()})

    def hints(self, hints: Hints) -> dict[sympy.Symbol, int]:
        """The current values, those of the parts too; rounded up where they were made up."""
        more = {}
        for symbol, multiple in self.whole.items():
            divisor, part = multiple.as_coeff_Mul()
            more[part] = -(-int(hints[symbol]) // int(divisor))
        return {**hints, **more}

    def restored(self, kernels: Kernels) -> Kernels:
        """The kernels in the symbols of the graph."""
        if not self.whole:
            return kernels
        back = _Back({part: s / d for s, m in self.whole.items() for d, part in [m.as_coeff_Mul()]})
        return Kernels(tuple(back.kernel(k) for k in kernels.kernels), tuple(map(back.buffer, kernels.temporaries)))


def _part(size: sympy.Expr) -> tuple[sympy.Symbol, int] | None:
    """s0 / 32 -> (s0, 32)"""
    coefficient, symbol = size.as_coeff_Mul()
    divisor = int(coefficient.q) if coefficient.is_Rational else 1
    return (symbol, divisor) if symbol.is_Symbol and divisor > 1 else None


@dataclass(frozen=True)
class _Back:
    """Replaces parts by what they are parts of."""

    into: Mapping[sympy.Symbol, sympy.Expr]

    def size(self, size: Any) -> Any:
        return simplify_size(size.xreplace(dict(self.into))) if isinstance(size, sympy.Basic) else size

    def buffer(self, buffer: Buffer) -> Buffer:
        return replace(buffer, shape=tuple(map(self.size, buffer.shape)), strides=tuple(map(self.size, buffer.strides)))

    def argument(self, argument: Pointer | Scalar) -> Pointer | Scalar:
        return replace(argument, value=self.size(argument.value)) if isinstance(argument, Scalar) else argument

    def kernel(self, kernel: Kernel) -> Kernel:
        return replace(
            kernel,
            arguments=tuple(map(self.argument, kernel.arguments)),
            grid=self.size(kernel.grid),
            scratch=tuple(map(self.buffer, kernel.scratch)),
            pinned=dict(self._pin(s, n) for s, n in kernel.pinned.items()),
            guards=tuple(g.xreplace(dict(self.into)) for g in kernel.guards),
            reads=self._sizes(kernel.reads),
            writes=self._sizes(kernel.writes),
            cached=self._sizes(kernel.cached),
            operations=self.size(kernel.operations),
        )

    def _pin(self, symbol: sympy.Symbol, value: int) -> tuple[sympy.Symbol, int]:
        if symbol not in self.into:
            return symbol, value
        share, multiple = self.into[symbol].as_coeff_Mul()
        return multiple, int(value / share)

    def _sizes(self, sizes: Mapping[str, Size]) -> dict[str, Size]:
        return {label: self.size(n) for label, n in sizes.items()}
