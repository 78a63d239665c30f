"""Where what a step multiplies is put together: the places at which a sum along it divides into sums of its pieces.

    cat(r, z, n) @ w    ->   r @ w[:a] + z @ w[a:b] + n @ w[b:]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import sympy

from ..graph import Value
from ..infer import is_below, sizes_equal
from ..passes.layout import segments
from ..prims import PRIMS
from ..types import Size, product, simplify_size

MOST = 16
"""Pieces of one sum, at most."""


def cuts(value: Value, dim: int) -> list[Size]:
    """The places along a dim where a piece of a concatenation begins, in order, that at 0 aside; none if unknown."""
    found = inner(_cuts(value, dim), value.shape[dim])
    return found if len(found) < MOST else []


def inner(places: Sequence[Size], size: Size) -> list[Size]:
    """The different places between the ends of an axis, in order; none if that is not known."""
    return _ordered([c for c in places if not sizes_equal(c, 0) and not sizes_equal(c, size)])


def _cuts(value: Value, dim: int) -> list[Size]:
    rule = RULES.get(value.prim) or FAMILIES.get(PRIMS[value.prim].family)
    return rule(value, dim) if rule is not None else []


def _of_cat(value: Value, dim: int) -> list[Size]:
    if value.params["axis"] != dim:
        return _of_all(value, dim)
    starts = accumulate((x.shape[dim] for x in value.args[:-1]), plus, initial=0)
    return [c for x, start in zip(value.args, starts, strict=True) for c in (start, *_moved(cuts(x, dim), start))]


def _of_pad(value: Value, dim: int) -> list[Size]:
    (x,), lo = value.args, value.params["lo"][dim]
    if value.params["inner"][dim]:
        return []
    return [lo, *_moved(cuts(x, dim), lo), plus(lo, x.shape[dim])]


def _of_permute(value: Value, dim: int) -> list[Size]:
    return cuts(value.args[0], value.params["perm"][dim])


def _of_broadcast(value: Value, dim: int) -> list[Size]:
    axes, (x,) = value.params["axes"], value.args
    is_own = dim in axes and sizes_equal(x.shape[axes.index(dim)], value.shape[dim])
    return cuts(x, axes.index(dim)) if is_own else []


def _of_reshape(value: Value, dim: int) -> list[Size]:
    """Of axes that are joined: those of the first, whose steps are as long as the others hold elements."""
    (x,) = value.args
    joined = next((left for left, right in segments(x.shape, value.shape) if dim in right), [])
    right = next(right for _, right in segments(x.shape, value.shape) if dim in right)
    wide = [a for a in joined if x.shape[a] != 1] or joined[:1]
    if any(value.shape[a] != 1 for a in right if a != dim) or not wide:
        return []
    inner = product(x.shape[a] for a in wide[1:])
    return [simplify_size(sympy.expand(c * inner)) if inner != 1 else c for c in cuts(x, wide[0])]


def _of_all(value: Value, dim: int) -> list[Size]:
    return [c for x in value.args for c in cuts(x, dim)]


RULES: dict[str, Callable[[Value, int], list[Size]]] = {
    "cat": _of_cat, "pad": _of_pad, "permute": _of_permute, "broadcast": _of_broadcast, "reshape": _of_reshape,
}  # fmt: skip
FAMILIES: dict[str, Callable[[Value, int], list[Size]]] = {"elementwise": _of_all}


def plus(a: Size, b: Size) -> Size:
    """a + b, multiplied out."""
    return simplify_size(sympy.expand(sympy.sympify(a) + b))


def _moved(places: Iterable[Size], by: Size) -> list[Size]:
    return [plus(c, by) for c in places]


def _ordered(places: Sequence[Size]) -> list[Size]:
    """The different ones from the smallest on; none where that is not known."""
    ordered: list[Size] = []
    for place in places:
        if any(sizes_equal(place, c) for c in ordered):
            continue
        below = [c for c in ordered if is_below(c, place)]
        if any(is_below(c, place) is None for c in ordered) or below != ordered[: len(below)]:
            return []
        ordered.insert(len(below), place)
    return ordered
