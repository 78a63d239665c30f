"""Rows that forward hands to backward: maxima are known as such, and sums that tiles are divided by are inverted.

    saved: max [n], sum [n]; p = exp(s - max) / sum   ->   saved: max [n], 1 / sum [n]; p = exp(s - max) * (1 / sum)

Inverted once, and not in each turn. Only where the quotient is virtual, made in float32 and rounded to a low float
then: kernels multiply there in any case.
"""

from __future__ import annotations

from collections.abc import Collection

from ...graph import Graph, Value
from ...rewrite import Rules, make, rebuild
from ...types import LOW_FLOATS

LAYOUTS = ("broadcast", "permute", "reshape")


def is_top(value: Value) -> bool:
    """Whether a row is the largest of what its exponents are made of: a maximum, or its sum with a logarithm."""
    if value.prim in (*LAYOUTS, "cast"):
        return is_top(value.args[0])
    if value.prim == "where":  # a number in place of an infinite one
        return value.args[1].prim in ("full", *LAYOUTS) and is_top(value.args[2])
    if value.prim == "add":
        return any(is_top(a) and b.prim == "log" for a, b in (value.args, value.args[::-1]))
    return value.prim == "amax"


def only_divides(known: Value, virtual: Collection[int]) -> bool:
    """Whether all that is done with an input, or with another layout of it, is to divide such tiles by it."""
    users = list(known.users)
    return bool(users) and all(
        only_divides(u, virtual) if u.prim in LAYOUTS else _is_quotient(u, known, virtual) for u in users
    )


def _is_quotient(value: Value, divisor: Value, virtual: Collection[int]) -> bool:
    is_one = value.prim == "div" and value.dtype == "f32" and value.args[0] != divisor and value.id in virtual
    return is_one and all(u.prim == "cast" and u.dtype in LOW_FLOATS for u in value.users)


def with_products(graph: Graph, inverted: Collection[int]) -> Graph:
    """Quotients by the reciprocals of these inputs, by their places, as products with the inputs."""
    if not inverted:
        return graph

    def product(value: Value) -> Value | None:
        base = _base(value.args[1])
        known = base.args[0] if base.prim == "reciprocal" else base
        is_inverse = base != known and known.prim == "input" and known.params["index"] in inverted
        return make("mul", value.args[0], _laid_out(value.args[1], known)) if is_inverse else None

    table: Rules = {"div": (product,)}
    return rebuild(graph, table)


def _base(value: Value) -> Value:
    while value.prim in LAYOUTS:
        (value,) = value.args
    return value


def _laid_out(model: Value, value: Value) -> Value:
    """The same layouts, one after the other, of another value than the model's."""
    if model.prim not in LAYOUTS:
        return value
    return make(model.prim, _laid_out(model.args[0], value), **model.params)
