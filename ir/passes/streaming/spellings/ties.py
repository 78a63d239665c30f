"""The elements of a row that are its extreme, which no kernel may ask bit for bit of what another one made.

    x == amax(x, 1)   ->   j == argmax(x, 1)  where one element is the extreme;  x is near amax(x, 1)  where several are

How many are, and where the first is, the walk that finds the extreme says: it compares what it has made itself. That is
backward's way to share an extreme's gradient, which `amax` derives: equal elements have equal parts of it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from ....graph import Graph, Value
from ....rewrite import make, rebuild
from ....types import LOW_FLOATS
from .split_sums import exact

PLACES = {"amax": "argmax", "amin": "argmin"}
NEAR = 2.0**-12
"""How much two kernels may differ in one sum, as a share of it: what is so near to several equal ones is of them."""


class Tie(NamedTuple):
    """x == extreme, of each row along an axis."""

    x: Value
    extreme: Value
    axis: int


def tie_of(value: Value) -> Tie | None:
    """The tie that a comparison asks for; None of another one."""
    if value.prim != "eq" or not value.args[0].aval.is_float:
        return None
    for x, other in (value.args, value.args[::-1]):
        extreme = _below_rows(other)
        if extreme.prim in PLACES and len(extreme.params["axes"]) == 1 and _same(extreme.args[0], x):
            (axis,) = extreme.params["axes"]
            return Tie(extreme.args[0], extreme, axis) if _repeats(other, x.ndim, axis) else None
    return None


def _below_rows(value: Value) -> Value:
    while value.prim in ("broadcast", "cast", "reshape"):
        (value,) = value.args
    return value


def _repeats(value: Value, ndim: int, axis: int) -> bool:
    """The extreme of each row, along all of it, with nothing but wider floats and axes of length one in between."""
    others = tuple(a for a in range(ndim) if a != axis)
    while value.prim == "cast" and _is_wider(value):
        (value,) = value.args
    if value.prim != "broadcast" or tuple(a for a in value.params["axes"] if a != axis) != others:
        return False
    (value,) = value.args
    while (value.prim == "cast" and _is_wider(value)) or (value.prim == "reshape" and _adds_one(value)):
        (value,) = value.args
    return value.prim in PLACES


def _adds_one(value: Value) -> bool:
    """A reshape that keeps every axis but those of length one."""
    shapes = ([n for n in v.shape if n != 1] for v in (value, value.args[0]))
    return next(shapes) == next(shapes)


def _same(x: Value, other: Value) -> bool:
    """One value, seen through wider floats."""
    return _exact(x) == _exact(other)


def _exact(value: Value) -> Value:
    while value.prim == "cast" and _is_wider(value):
        (value,) = value.args
    return value


def _is_wider(cast: Value) -> bool:
    return cast.args[0].dtype == cast.dtype or (cast.args[0].dtype in LOW_FLOATS and cast.dtype in ("f32", "f64"))


def _counts(tie: Value, axis: int) -> list[Value]:
    """The sums along a row of what is equal to its extreme: they are made where the extreme is."""
    casts = [u for u in tie.users if u.prim == "cast"]
    return [u for v in (tie, *casts) for u in v.users if u.prim == "sum" and u.params["axes"] == (axis,)]


def without_ties(graph: Graph, virtual: frozenset[int]) -> Graph:
    """The graph in which walks find the ties of virtual values, and the others read what these have found."""
    ties = {v: tie for v in graph.order() if (tie := tie_of(v)) is not None and tie.x.id in virtual}
    replaced = {v.id: partial(_found, tie) for v, tie in ties.items()}
    counts = {u.id: partial(_counted, tie, u.dtype) for v, tie in ties.items() for u in _counts(v, tie.axis)}
    return rebuild(graph, {}, {**replaced, **counts}) if ties else graph


def _counted(tie: Tie, dtype: str, env: dict[int, Value]) -> Value:
    count = _count(tie, env[tie.x.id])
    return make("cast", count, dtype=dtype) if dtype != count.dtype else count


def _count(tie: Tie, x: Value) -> Value:
    """How many elements of a row are its extreme, by the kernel that finds it."""
    equal = make("eq", x, _rows(make(tie.extreme.prim, x, axes=(tie.axis,)), x, tie.axis))
    return make("sum", make("cast", equal, dtype="i64"), axes=(tie.axis,))


def _found(tie: Tie, env: dict[int, Value]) -> Value:
    """j == place where the extreme is one element, what is near it where it is several."""
    x, axis = env[tie.x.id], tie.axis
    count, place = _count(tie, x), make(PLACES[tie.extreme.prim], x, axis=axis)
    columns = make("broadcast", make("iota", size=x.shape[axis], dtype="i64"), shape=x.shape, axes=(axis,))
    first = make("eq", columns, _rows(place, x, axis))
    one = make("full", value=1, shape=count.shape, dtype="i64")
    near = make("and", _rows(make("gt", count, one), x, axis), _is_near(tie, exact(x)))
    return make("where", _rows(make("eq", count, one), x, axis), first, near)


def _is_near(tie: Tie, x: Value) -> Value:
    """Of infinities as well, whose difference is none."""
    extreme = make(tie.extreme.prim, x, axes=(tie.axis,))
    far = make("mul", make("abs", extreme), make("full", value=NEAR, shape=extreme.shape, dtype=extreme.dtype))
    apart = make("abs", make("sub", x, _rows(extreme, x, tie.axis)))
    return make("not", make("gt", apart, _rows(far, x, tie.axis)))


def _rows(row: Value, x: Value, axis: int) -> Value:
    return make("broadcast", row, shape=x.shape, axes=tuple(a for a in range(x.ndim) if a != axis))
