"""Constant folding, exactly as the device would: every step is rounded to the dtype of its node.

Only operations that IEEE 754 rounds correctly are folded (exp, log, sin are not: devices differ in the last place).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import sympy

from ...graph import Value
from ...rewrite import Rules, make, number_of
from ...types import FLOATS, INTEGERS, LOW_FLOATS

Scalar = bool | int | float

NUMPY: dict[str, Any] = {
    "f16": np.float16, "f32": np.float32, "f64": np.float64, "b1": np.bool_,
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
}  # fmt: skip


def rounded(number: Scalar, dtype: str) -> Scalar | None:
    """The number as a value of `dtype`; None where devices convert it differently (overflow, nan to int)."""
    if dtype == "b1":
        return bool(number)
    if dtype in INTEGERS:
        return _integer(number, dtype)
    if dtype == "bf16":
        return _bf16(float(number))
    if dtype not in FLOATS:
        return None
    with np.errstate(over="ignore", under="ignore"):
        return float(NUMPY[dtype](number))


def _integer(number: Scalar, dtype: str) -> int | None:
    if not math.isfinite(number):
        return None
    limits = np.iinfo(NUMPY[dtype])
    return int(number) if limits.min <= int(number) <= limits.max else None


def _bf16(number: float) -> float:
    """Round to nearest, ties to even, on the upper 16 bits of a float32."""
    with np.errstate(over="ignore"):
        single = np.float32(number)
    if not np.isfinite(single):
        return float(single)
    bits = int(single.view(np.uint32))
    return float(np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "neg": lambda x: -x,
    "abs": abs,
    "sqrt": np.sqrt,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "reciprocal": lambda x: np.divide(x.dtype.type(1), x),
    "isnan": np.isnan,
    "isinf": np.isinf,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": np.invert,
}
SYMBOLIC: dict[str, Callable[..., Any]] = {
    "neg": lambda x: -x,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
}
"""Operations folded over sizes: i64 arithmetic without wrapping, as sizes are far from 2**63."""


def fold(value: Value) -> Value | None:
    """add(full(2), full(3))  ->  full(5)"""
    if not value.args or any(a.prim != "full" for a in value.args):
        return None
    numbers = [number_of(a) for a in value.args]
    if any(n is None for n in numbers):
        return _fold_sizes(value)
    result = _computed(value.prim, [n for n in numbers if n is not None], value.args[0].dtype)
    number = None if result is None else rounded(result, value.dtype)
    return None if number is None else make("full", value=number, shape=value.shape, dtype=value.dtype)


def _computed(prim: str, numbers: list[Scalar], dtype: str) -> Scalar | None:
    values = [rounded(n, dtype) for n in numbers]
    wide = "f32" if dtype in LOW_FLOATS else dtype
    if wide not in NUMPY or any(v is None for v in values):
        return None
    with np.errstate(all="ignore"):
        result: Scalar = ARITHMETIC[prim](*(NUMPY[wide](v) for v in values)).item()
    return result


def _fold_sizes(value: Value) -> Value | None:
    """mul(full(s0), full(4))  ->  full(4*s0)   in i64"""
    if value.prim not in SYMBOLIC or value.dtype != "i64":
        return None
    number = SYMBOLIC[value.prim](*(sympy.sympify(a.params["value"]) for a in value.args))
    return make("full", value=number, shape=value.shape, dtype=value.dtype)


def fold_cast(value: Value) -> Value | None:
    """cast(full(v), dtype)  ->  full(v rounded, dtype)"""
    (source,) = value.args
    if source.prim != "full":
        return None
    number = number_of(source)
    if number is None:
        exact = source.dtype in INTEGERS and source.params["value"].is_integer and value.dtype in (*FLOATS, "i64")
        return make("full", value=source.params["value"], shape=value.shape, dtype=value.dtype) if exact else None
    rounded_source = rounded(number, source.dtype)
    result = None if rounded_source is None else rounded(rounded_source, value.dtype)
    return None if result is None else make("full", value=result, shape=value.shape, dtype=value.dtype)


def fold_choice(value: Value) -> Value | None:
    """sub(1, where(c, 1, 0))  ->  where(c, 0, 1)   of two numbers each is folded: `torch.tril(ones) == 0` is a mask"""
    conditions = list(dict.fromkeys(c for a in value.args if (c := _condition(a)) is not None))
    if len(conditions) != 1 or any(a.prim != "full" and _condition(a) is None for a in value.args):
        return None
    numbers = [make(value.prim, *(_chosen(a, answer) for a in value.args), **value.params) for answer in (True, False)]
    return make("where", conditions[0], *numbers) if all(n.prim == "full" for n in numbers) else None


def _condition(value: Value) -> Value | None:
    """That which chooses between two numbers, of which a boolean as a number is one."""
    if value.prim == "where":
        return value.args[0] if all(a.prim == "full" for a in value.args[1:]) else None
    return value.args[0] if value.prim == "cast" and value.args[0].dtype == "b1" else None


def _chosen(value: Value, answer: bool) -> Value:
    if value.prim == "where":
        return value.args[1 if answer else 2]
    return make("full", value=int(answer), shape=value.shape, dtype=value.dtype) if value.prim == "cast" else value


def fold_cast_of_choice(value: Value) -> Value | None:
    """cast(where(c, 1, 0), dtype)  ->  where(c, 1, 0)   in that dtype; a boolean that is cast twice is one cast"""
    return fold_choice(value) if value.args[0].prim == "where" else None


constants: Rules = {"cast": (fold_cast, fold_cast_of_choice), **{prim: (fold, fold_choice) for prim in ARITHMETIC}}
