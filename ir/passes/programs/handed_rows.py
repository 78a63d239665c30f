"""Rows that forward hands to backward: maxima are known as such, and sums that tiles are divided by are inverted.

    saved: max [n], sum [n]; p = exp(s - max) / sum   ->   saved: max [n], r = 1 / sum [n]; p = exp(s - max) / (1 / r)

Inverted once, and not in each turn: kernels take the quotient by a reciprocal for a product. Only where the
quotient is virtual and rounded to a low float, which is a product with the reciprocal in any case.
"""

from __future__ import annotations

from collections.abc import Collection

from ...graph import Value
from ...types import LOW_FLOATS

LAYOUTS = ("broadcast", "permute", "reshape")


def is_top(value: Value) -> bool:
    """Whether a row is the largest of what its exponents are made of: a maximum, or its sum with a sum's logarithm."""
    value = _bare(value)
    if value.prim == "where":  # a number in place of an infinite one
        return value.args[1].prim in ("full", *LAYOUTS) and is_top(value.args[2])
    if value.prim == "add":
        return any(is_top(a) and _is_log_of_sum(b) for a, b in (value.args, value.args[::-1]))
    return value.prim == "amax"


def _is_log_of_sum(value: Value) -> bool:
    value = _bare(value)
    return value.prim == "log" and _bare(value.args[0]).prim == "sum"


def _bare(value: Value) -> Value:
    """What a value is in another layout or dtype."""
    while value.prim in (*LAYOUTS, "cast"):
        (value,) = value.args
    return value


def only_divides(known: Value, virtual: Collection[int]) -> bool:
    """Whether all that is done with an input, or with another layout of it, is to divide such tiles by it."""
    users = list(known.users)
    return bool(users) and all(
        only_divides(u, virtual) if u.prim in (*LAYOUTS, "cast") else _is_quotient(u, known, virtual) for u in users
    )


def _is_quotient(value: Value, divisor: Value, virtual: Collection[int]) -> bool:
    is_rounded = value.dtype in LOW_FLOATS or all(u.prim == "cast" and u.dtype in LOW_FLOATS for u in value.users)
    return value.prim == "div" and value.args[0] != divisor and value.id in virtual and is_rounded
