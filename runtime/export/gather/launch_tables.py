"""Kernels of one text for several blocks of a row as one version: numbers that differ become expressions in the block.

    BLOCK_M = 64, 32, 16 for BLOCK_N = 32, 64, 128    ->  BLOCK_M = 2048 / BLOCK_N
    num_warps = 4, 4, 8                               ->  a column {32: 4, 64: 4, 128: 8}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from ....codegen import Kernel, Kernels, Pointer, Scalar
from ....codegen.kernel import Buffer
from ....ir.types import Size
from .versions import Column, Row, Version

TUNED = "TUNED"
"""The name of a column of numbers within a formula."""


class Different(Exception):
    """Kernels that are no version together: their texts or their formulas differ."""


def as_one(kernels: Sequence[Kernels], blocks: Sequence[int], row: Row, conditions: Sequence[sympy.Basic]) -> Version:
    """The version of these kernels, each for one block. Raises Different."""
    if len({_texts(k) for k in kernels}) > 1:
        raise Different
    table = Table(row, tuple(blocks))
    merged = [_kernel(table, several) for several in zip(*(k.kernels for k in kernels), strict=True)]
    temporaries = tuple(_buffer(table, several) for several in zip(*(k.temporaries for k in kernels), strict=True))
    words = {kernel.name: own for kernel, own in merged if own}
    made = Kernels(tuple(kernel for kernel, _ in merged), temporaries)
    return Version(made, tuple(conditions), row, words, table.columns)


def _texts(kernels: Kernels) -> tuple[Any, ...]:
    """What kernels of one version have in common."""
    return (
        tuple((k.name, k.source, k.aligned, k.fast, len(k.scratch), tuple(k.constants)) for k in kernels.kernels),
        tuple((b.name, b.dtype) for b in kernels.temporaries),
    )


def _kernel(table: Table, kernels: Sequence[Kernel]) -> tuple[Kernel, dict[str, Size]]:
    """One kernel for all blocks, and its words."""
    first = kernels[0]
    words = {name: table.number([k.constants[name] for k in kernels], name) for name in first.constants}
    words["num_warps"] = table.number([k.num_warps for k in kernels], "WARPS")
    words["num_stages"] = table.number([k.num_stages for k in kernels], "STAGES")
    arguments = tuple(_argument(table, several) for several in zip(*(k.arguments for k in kernels), strict=True))
    scratch = tuple(_buffer(table, several) for several in zip(*(k.scratch for k in kernels), strict=True))
    grid = table.expression([k.grid for k in kernels], TUNED)
    merged = replace(first, arguments=arguments, scratch=scratch, grid=grid)
    return merged, {name: word for name, word in words.items() if isinstance(word, sympy.Basic)}


def _argument(table: Table, arguments: Sequence[Pointer | Scalar]) -> Pointer | Scalar:
    first = arguments[0]
    scalars = [a for a in arguments if isinstance(a, Scalar)]
    if isinstance(first, Scalar) and [a.name for a in scalars] == [first.name] * len(arguments):
        return Scalar(first.name, table.expression([a.value for a in scalars], TUNED))
    if arguments.count(first) < len(arguments):
        raise Different
    return first


def _buffer(table: Table, buffers: Sequence[Buffer]) -> Buffer:
    shape, strides = (
        tuple(table.expression(several, TUNED) for several in zip(*sizes, strict=True))
        for sizes in ([b.shape for b in buffers], [b.strides for b in buffers])
    )
    return replace(buffers[0], shape=shape, strides=strides)


# ------------------------------------------------------------------ numbers by block
@dataclass
class Table:
    """Expressions that agree for every block, and the columns that they read."""

    row: Row
    blocks: tuple[int, ...]
    columns: dict[sympy.Symbol, Column] = field(default_factory=dict)

    def number(self, values: Sequence[Any], wish: str) -> Any:
        """A constant of a launch: a number, or an expression; any other is the same for all blocks."""
        if all(v == values[0] for v in values):
            return values[0]
        return self.expression(values, wish)

    def expression(self, values: Sequence[Any], wish: str) -> Size:
        """The expression that is each of the values for its block. Raises Different."""
        general = self._general([sympy.sympify(v) for v in values], wish)
        for block, value in zip(self.blocks, values, strict=True):
            if not sympy.sympify(value - self._at(general, block)).equals(0):
                raise Different
        return int(general) if general.is_Integer else general

    def _at(self, general: sympy.Expr, block: int) -> sympy.Expr:
        putting = {s: sympy.Integer(c.values[block]) for s, c in self.columns.items()}
        return general.xreplace({**putting, self.row.block: sympy.Integer(block)})

    def _general(self, values: Sequence[sympy.Expr], wish: str) -> sympy.Expr:
        first = values[0]
        if all(v == first for v in values):
            return first
        if all(v.is_Rational for v in values):
            parts = zip(*((int(v.p), int(v.q)) for v in values), strict=True)
            top, bottom = (self._whole(part, wish) for part in parts)
            return top / bottom
        if any(type(v) is not type(first) or len(v.args) != len(first.args) or v.is_Atom for v in values):
            raise Different
        columns = zip(*(_in_order(v) for v in values), strict=True)
        return first.func(*(self._general(several, wish) for several in columns))

    def _whole(self, numbers: Sequence[int], wish: str) -> sympy.Expr:
        """Of whole numbers: one number, a multiple or a part of the block, or a column."""
        first, block = numbers[0], self.row.block
        if all(n == first for n in numbers):
            return sympy.Integer(first)
        pairs = list(zip(numbers, self.blocks, strict=True))
        if len({n * b for n, b in pairs}) == 1:
            return first * self.blocks[0] / block
        if len({sympy.Rational(n, b) for n, b in pairs}) == 1:
            return sympy.Rational(first, self.blocks[0]) * block
        return self._column(numbers, wish)

    def _column(self, numbers: Sequence[int], wish: str) -> sympy.Symbol:
        values = dict(zip(self.blocks, numbers, strict=True))
        same = next((s for s, c in self.columns.items() if c.values == values), None)
        if same is None:
            same = sympy.Symbol(f"column_{len(self.columns)}", integer=True, positive=True)
            self.columns[same] = Column(wish, values)
        return same


def _in_order(value: sympy.Expr) -> Sequence[sympy.Expr]:
    """The operands of a node, those of one shape beside each other: sympy has an order of its own by their numbers."""
    commutes = isinstance(value, sympy.Add | sympy.Mul | sympy.Min | sympy.Max)
    return sorted(value.args, key=lambda a: (_shape(a), a.sort_key())) if commutes else value.args


def _shape(value: sympy.Expr) -> str:
    """The expression without its numbers."""
    if value.is_Rational:
        return "#"
    return f"{type(value).__name__}({','.join(sorted(map(_shape, value.args)))})" if value.args else str(value)
