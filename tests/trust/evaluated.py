"""The text of a kernel, run for one program, one turn of each loop and one lane of each block, on Python numbers.

Integers are as wide as Triton makes them and wrap around as they do there; sizes may be larger than any machine holds.
What comes of it are the places that it touches. It shares nothing with `codegen.proofs` but the language.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from fusegrad.codegen import Kernel, Pointer
from fusegrad.codegen.emit.prelude import HELPERS

DTYPES = {"int8": 8, "int16": 16, "int32": 32, "int64": 64, "int1": 1}


@dataclass(frozen=True)
class Number:
    """An integer of so many bits (0: a constant); `wrapped`: on the way here something did not fit."""

    value: int
    bits: int = 0
    wrapped: bool = False


@dataclass(frozen=True)
class Place:
    pointer: str
    offset: int
    wrapped: bool


@dataclass(frozen=True)
class Touched:
    """An access that the mask let through."""

    kind: str
    place: Place
    text: str


class _Nothing(Exception):
    """No turn of a loop is left for this program."""


def fitted(value: int, bits: int, wrapped: bool = False) -> Number:
    if not bits:
        return Number(value, 0, wrapped)
    low = 1 << (bits - 1)
    inside = (value + low) % (2 * low) - low
    return Number(inside, bits, wrapped or inside != value)


def narrowest(value: int) -> Number:
    """An argument, as wide as it needs."""
    return Number(value, 32 if -(2**31) <= value < 2**31 else 64)


class Run:
    """One program of a kernel at given sizes."""

    def __init__(self, kernel: Kernel, scalars: Mapping[str, int], grid: int, seed: int, index: int = 4) -> None:
        self.random, self.grid, self.index = Random(seed), grid, index
        self.program = self.random.choice((0, grid - 1, self.random.randrange(grid)))
        self.touched: list[Touched] = []
        dtypes = {p.name: p.dtype for p in kernel.arguments if isinstance(p, Pointer)}
        self.integral = {n for n, d in dtypes.items() if d[0] in "iu"}
        self.env: dict[str, Any] = {n: Place(n, 0, False) for n in dtypes}
        self.env |= {n: narrowest(v) for n, v in scalars.items()}
        self.env |= {n: Number(v) if type(v) is int else None for n, v in kernel.constants.items()}
        self.lanes: dict[int, Number] = {}
        (function,) = ast.parse(kernel.source.removeprefix("@triton.jit\n")).body
        self.block(function.body)  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ statements
    def block(self, body: list[ast.stmt]) -> Any:
        for node in body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.env[name] = self.value(value)
                case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                    self.env[name] = self.binary(op, self.env.get(name), self.value(value))
                case ast.For(target=ast.Name(id=name), iter=ast.Call(args=args), body=inner):
                    self.loop(name, [self.value(a) for a in args], inner)
                case ast.If(test=test, body=inner):
                    if self.value(test) is not False:
                        self.block(inner)
                case ast.Expr(value=value):
                    self.value(value)
                case ast.Return(value=value):
                    return self.value(value) if value else None
        return None

    def loop(self, name: str, bounds: list[Number], body: list[ast.stmt]) -> None:
        start, stop, step = (Number(0), *bounds, Number(1)) if len(bounds) == 1 else (*bounds, Number(1))[:3]
        turns = -(-(stop.value - start.value) // step.value)
        if turns > 0:
            turn = self.random.choice((0, turns - 1, self.random.randrange(turns)))
            wrapped = start.wrapped or stop.wrapped or step.wrapped
            self.env[name] = Number(start.value + turn * step.value, max(start.bits, stop.bits, 32), wrapped)
            self.block(body)

    # ------------------------------------------------------------------ expressions
    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return Number(value) if type(value) is int else None
            case ast.Name(id=name):
                return self.env.get(name)
            case ast.Subscript(value=value):
                return self.value(value)
            case ast.BinOp(left=left, op=op, right=right):
                return self.binary(op, self.value(left), self.value(right))
            case ast.UnaryOp(op=ast.USub(), operand=x):
                x = self.value(x)
                return fitted(-x.value, x.bits, x.wrapped) if isinstance(x, Number) else None
            case ast.UnaryOp(operand=x):
                x = self.value(x)
                return not x if isinstance(x, bool) else None
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self.compared(op, self.value(left), self.value(right))
            case ast.Call():
                return self.call(node)
        return None

    def compared(self, op: ast.cmpop, a: Any, b: Any) -> Any:
        if not (isinstance(a, Number) and isinstance(b, Number)):
            return None
        x, y = a.value, b.value
        kinds = {"Lt": x < y, "LtE": x <= y, "Gt": x > y, "GtE": x >= y, "Eq": x == y, "NotEq": x != y}
        return kinds[type(op).__name__]

    def binary(self, op: ast.operator, a: Any, b: Any) -> Any:
        if isinstance(a, Place) and isinstance(b, Number):
            sign = -1 if isinstance(op, ast.Sub) else 1
            return Place(a.pointer, a.offset + sign * b.value, a.wrapped or b.wrapped)
        if isinstance(op, (ast.BitAnd, ast.BitOr)) and {type(a), type(b)} <= {bool, type(None)}:
            known = [v for v in (a, b) if v is not None]
            return all(known) if isinstance(op, ast.BitAnd) else any(known) or (None if len(known) < 2 else False)
        if not (isinstance(a, Number) and isinstance(b, Number)):
            return None
        return self.arithmetic(op, a, b)

    def arithmetic(self, op: ast.operator, a: Number, b: Number) -> Any:
        x, y, bits, wrapped = a.value, b.value, max(a.bits, b.bits), a.wrapped or b.wrapped
        if isinstance(op, (ast.FloorDiv, ast.Mod)):
            quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
            return fitted(quotient if isinstance(op, ast.FloorDiv) else x - y * quotient, bits, wrapped)
        results = {"Add": lambda: x + y, "Sub": lambda: x - y, "Mult": lambda: x * y}
        known = results.get(type(op).__name__)
        return fitted(known(), bits, wrapped) if known else None

    # ------------------------------------------------------------------ calls
    def call(self, node: ast.Call) -> Any:
        name = ast.unparse(node.func)
        if name.endswith(".to"):
            return self.cast(self.value(node.func.value), node.args[0])  # type: ignore[attr-defined]
        if name in ("tl.load", "tl.store", "tl.atomic_add", "known", "last_to_arrive", "tell", "in_vain"):
            return self.access(name, node)
        if name == "tl.program_id":
            return Number(self.program, 32)
        if name == "tl.arange":
            last = self.value(node.args[1]).value - 1
            known = self.lanes.setdefault(
                id(node), Number(self.random.choice((0, last, self.random.randint(0, last))), 32)
            )
            return known
        if name in ("tl.cast", "tl.full"):
            return self.cast(self.value(node.args[0 if name == "tl.cast" else 1]), node.args[-1])
        if name == "tl.zeros":
            return self.cast(Number(0), node.args[1])
        return self.function(name, [self.value(a) for a in node.args], node)

    def cast(self, x: Any, dtype: ast.expr) -> Any:
        bits = DTYPES.get(getattr(dtype, "attr", ""), 0)
        return fitted(x.value, bits, x.wrapped) if isinstance(x, Number) and bits > 1 else None

    def function(self, name: str, given: list[Any], node: ast.Call) -> Any:
        if name == "tl.where" and len(given) == 3:
            return given[1] if given[0] is not False else given[2]
        if not given or not all(isinstance(g, Number) for g in given):
            return None
        numbers = [g.value for g in given]
        bits, wrapped = max(g.bits for g in given), any(g.wrapped for g in given)
        if name in ("tl.minimum", "tl.maximum"):
            return Number((min if name == "tl.minimum" else max)(numbers), bits, wrapped)
        if name == "tl.cdiv":
            up = fitted(numbers[0] + numbers[1] - 1, bits, wrapped)
            return self.arithmetic(ast.FloorDiv(), up, given[1])
        if name == "tl.multiple_of":
            assert numbers[0] % numbers[1] == 0, ast.unparse(node)
            return given[0]
        if name in ("modulo", "floor_quotient"):
            return Number(numbers[0] % numbers[1] if name == "modulo" else numbers[0] // numbers[1], bits, wrapped)
        return self.inlined(name, given, node) if name in HELPERS else None

    def inlined(self, name: str, given: list[Any], node: ast.Call) -> Any:
        (function,) = ast.parse(HELPERS[name].removeprefix("@triton.jit\n")).body
        names = [a.arg for a in function.args.args]  # type: ignore[attr-defined]
        outer, defaults = self.env, function.args.defaults  # type: ignore[attr-defined]
        own = dict(zip(names[len(names) - len(defaults) :], map(self.value, defaults), strict=True))
        self.env = own | dict(zip(names, given, strict=False)) | {k.arg: self.value(k.value) for k in node.keywords}
        result = self.block(function.body)  # type: ignore[attr-defined]
        self.env = outer
        return result

    def access(self, name: str, node: ast.Call) -> Any:
        place = self.value(node.args[0])
        mask = next((self.value(k.value) for k in node.keywords if k.arg == "mask"), True)
        assert isinstance(place, Place), ast.unparse(node)
        if mask is not False:
            self.touched.append(Touched(name, place, ast.unparse(node)))
        if name in ("last_to_arrive", "tell", "in_vain"):
            return None
        return Number(self.random.randrange(self.index), 64) if place.pointer in self.integral else None
