"""Comparisons that the range of an index answers, numbers that are counted, and sums that a place leaves one term of.

    ne(iota(n), -100)                                ->  True           labels that are an arange: none is ignored
    sum(full(1, (n,)))                               ->  n
    sum over j of where(j == index[i], x[i], 0.0)    ->  x[i] + 0.0     index in 0 .. n - 1

The last is the gradient of a loss along its classes: a sum of n places for each row, of which one is not zero.
"""

from __future__ import annotations

import math

import sympy

from ...graph import Value
from ...rewrite import Rules, make, number_of
from ...types import FLOATS, INTEGERS, product, simplify_size
from ..index_checks import is_never_negative, is_within
from ..layout import without_axes

BESIDE_NEGATIVE = {"ne": True, "gt": True, "ge": True, "eq": False, "lt": False, "le": False}
"""What x >= 0 answers beside a number below zero."""
BESIDE_ZERO = {"ge": True, "lt": False}
SMALL = 1 << 31
"""Numbers that are counted: times any size they fit 64 bits."""


def answered(value: Value) -> Value | None:
    """ne(x, -100)  ->  True   where x is never negative"""
    x, number = value.args[0], number_of(value.args[1])
    if x.dtype not in INTEGERS or number is None or number > 0:
        return None
    answer = (BESIDE_NEGATIVE if number < 0 else BESIDE_ZERO).get(value.prim)
    if answer is None or not is_never_negative(x):
        return None
    return make("full", value=answer, shape=value.shape, dtype="b1")


def counted(value: Value) -> Value | None:
    """sum(full(v, (n,)))  ->  full(v * n)"""
    (x,) = value.args
    number = number_of(x)
    if number is None or value.dtype != "i64" or x.dtype != "i64" or abs(number) >= SMALL:
        return None
    count = product(x.shape[a] for a in value.params["axes"])
    return make("full", value=simplify_size(sympy.sympify(count) * int(number)), shape=value.shape, dtype="i64")


def selected(value: Value) -> Value | None:
    """sum over j of where(j == index[i], x[i], 0.0)  ->  x[i] + 0.0   which is 0.0 for -0.0, as the sum is"""
    axes, choice = value.params["axes"], value.args[0]
    casts = []
    while choice.prim == "cast":
        casts.append(choice.dtype)
        (choice,) = choice.args
    if len(axes) != 1 or choice.prim != "where" or not _is_one_of(choice.args[0], axes[0]):
        return None
    x, other = without_axes(choice.args[1], axes), number_of(choice.args[2])
    if x is None or other != 0 or math.copysign(1, other) < 0 or {*casts, x.dtype} - {*FLOATS, *INTEGERS}:
        return None
    for dtype in reversed(casts):
        x = make("cast", x, dtype=dtype)
    if x.dtype != value.dtype:
        return None
    return make("add", x, make("full", value=0.0 if x.dtype in FLOATS else 0, shape=x.shape, dtype=x.dtype))


def _is_one_of(condition: Value, axis: int) -> bool:
    """j == index, of an index that does not vary along j, and is one of its places."""
    return condition.prim == "eq" and any(
        are_places(j, axis) and (small := without_axes(index, (axis,))) is not None and is_within(small, j.shape[axis])
        for j, index in (condition.args, condition.args[::-1])
    )


def are_places(value: Value, axis: int) -> bool:
    """The number of the place along an axis."""
    return value.prim == "broadcast" and value.params["axes"] == (axis,) and value.args[0].prim == "iota"


places: Rules = {**dict.fromkeys(BESIDE_NEGATIVE, (answered,)), "sum": (counted, selected)}
