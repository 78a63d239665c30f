"""Concatenations beside products that are never in memory: what is made of one is made of its parts.

    exp(cat(s, sink) - m)     ->   cat(exp(s - m), exp(sink - m))
    sum(cat(p, lost), -1)     ->   sum(p, -1) + lost
    cat(p, lost)[..., :-1]    ->   p
    pad(dp, 1 column) - d     ->   cat(dp - d, 0 - d)
    where(j == 0, cat(pos, s), 0)   ->   cat(where(j == 0, pos, 0), where(j + 1 == 0, s, 0))     j = 0, 1, ..

A kernel walks the columns of one product; a column more is a term of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from ....graph import Graph, Value
from ....infer import same_shape
from ....prims import PRIMS
from ....rewrite import Rules, join_rules, make, rebuild
from ....types import LOW_FLOATS, Size
from ...layout import layout

JOINS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}
"""How the reductions of parts are the reduction of all."""


def without_concatenations(graph: Graph, virtual: frozenset[int]) -> Graph:
    """The graph with virtual values in no concatenation, where that can be."""
    has_some = any(v.prim == "cat" and v.id in virtual for v in graph.order())
    return rebuild(graph, PARTED) if has_some else graph


# ------------------------------------------------------------------ rules
def _of_parts(value: Value) -> Value | None:
    """An operation element by element, of each part."""
    cats = [a for a in value.args if a.prim == "cat"]
    if not cats:
        return None
    axis = cats[0].params["axis"]
    sizes = [p.shape[axis] for p in cats[0].args]
    operands = [_parts(a, axis, sizes) for a in value.args]
    parts = [[parts[n] for parts in operands if parts is not None] for n in range(len(sizes))]
    if None in operands:
        return None
    return make("cat", *(make(value.prim, *of, **value.params) for of in parts), axis=axis)


def _parts(value: Value, axis: int, sizes: Sequence[Size]) -> list[Value] | None:
    """The parts of a value, of these sizes along the axis; None where that would copy it."""
    if value.prim == "cat":
        alike = value.params["axis"] == axis and same_shape([p.shape[axis] for p in value.args], sizes)
        return list(value.args) if alike else None
    shapes = [(*value.shape[:axis], size, *value.shape[axis + 1 :]) for size in sizes]
    if value.prim == "full":
        return [make("full", **value.params | {"shape": shape}) for shape in shapes]
    if value.prim == "broadcast":
        return _parts_of_broadcast(value, axis, sizes, shapes)
    if value.prim == "iota":
        return _places(value, sizes)
    return _parts_of_places(value, axis, sizes)


def _parts_of_broadcast(
    value: Value, axis: int, sizes: Sequence[Size], shapes: Iterable[Sequence[Size]]
) -> list[Value] | None:
    (x,), axes = value.args, value.params["axes"]
    own = _parts(x, axes.index(axis), sizes) if axis in axes else [x] * len(sizes)
    return own and [make("broadcast", part, shape=shape, axes=axes) for part, shape in zip(own, shapes, strict=True)]


def _places(iota: Value, sizes: Sequence[Size]) -> list[Value]:
    """The places that the parts have in the whole."""
    starts = accumulate(sizes[:-1], initial=0)
    parts = [(make("iota", **iota.params | {"size": size}), start) for size, start in zip(sizes, starts, strict=True)]
    return [part if start == 0 else make("add", part, _number_like(part, start)) for part, start in parts]


def _number_like(value: Value, number: Size) -> Value:
    return make("full", value=number, shape=value.shape, dtype=value.dtype)


def _parts_of_places(value: Value, axis: int, sizes: Sequence[Size]) -> list[Value] | None:
    """Of what is made of places and numbers alone."""
    if PRIMS[value.prim].family != "elementwise" or value.ndim != 1:
        return None
    operands = [_parts(a, axis, sizes) for a in value.args]
    made = [parts for parts in operands if parts is not None]
    return [make(value.prim, *of, **value.params) for of in zip(*made, strict=True)] if made == operands else None


def _of_reduction(value: Value) -> Value | None:
    """A reduction of parts, each by itself."""
    (cat,) = value.args
    if cat.prim != "cat" or cat.params["axis"] not in value.params["axes"]:
        return None
    wide = "f32" if value.dtype in LOW_FLOATS and value.prim in ("sum", "prod") else value.dtype
    first, *others = (_reduced(value, _cast(part, wide), cat.params["axis"]) for part in cat.args)
    for other in others:
        first = make(JOINS[value.prim], first, other)
    return _cast(first, value.dtype)


def _reduced(value: Value, part: Value, axis: int) -> Value:
    """A part of one column is its own reduction."""
    over = [a for a in value.params["axes"] if a != axis or part.shape[axis] != 1]
    if len(over) < len(value.params["axes"]):
        part = make("reshape", part, shape=(*part.shape[:axis], *part.shape[axis + 1 :]))
        over = [a - (a > axis) for a in over]
    return make(value.prim, part, axes=tuple(over)) if over else part


def _cast(value: Value, dtype: str) -> Value:
    return make("cast", value, dtype=dtype) if value.dtype != dtype else value


def _of_slice(value: Value) -> Value | None:
    """One of the parts."""
    (cat,) = value.args
    if cat.prim != "cat":
        return None
    axis, at = cat.params["axis"], 0
    others = [n for i, n in enumerate(value.shape) if i != axis]
    if set(value.params["step"]) != {1} or not same_shape(others, [n for i, n in enumerate(cat.shape) if i != axis]):
        return None
    for part in cat.args:
        if same_shape([value.params["start"][axis], value.shape[axis]], [at, part.shape[axis]]):
            return part
        at = at + part.shape[axis]
    return None


def _of_pad(value: Value) -> Value | None:
    """What is padded along one axis is a part; zeros before and behind it are others."""
    edges = list(zip(value.params["lo"], value.params["hi"], strict=True))
    padded = [axis for axis, both in enumerate(edges) if both != (0, 0)]
    if len(padded) != 1 or any(value.params["inner"]):
        return None
    (axis,), (x,) = padded, value.args
    shapes = [(*value.shape[:axis], n, *value.shape[axis + 1 :]) for n in edges[axis]]
    before, behind = ([make("full", shape=s, dtype=x.dtype, value=0)] if s[axis] != 0 else [] for s in shapes)
    return make("cat", *before, x, *behind, axis=axis)


PARTED: Rules = join_rules(
    {name: (_of_parts,) for name, prim in PRIMS.items() if prim.family == "elementwise"},
    {name: (_of_reduction,) for name in JOINS},
    {"slice": (_of_slice,), "pad": (_of_pad,)},
    layout,
)
