"""Slices of what no memory holds: positions, numbers and masks of them are made for the slice alone.

    slice(le(iota(8192), full(3)), 0 .. T)  ->  le(iota(T), full(3))

So the mask of a class's longest rows, cut to those of a call, is one that kernels know as the bound of a block.
"""

from __future__ import annotations

from ...graph import Value
from ...prims import PRIMS
from ...rewrite import Rules, make

MOST_NODES = 32
"""Nodes that a mask is made of, at most: what is asked again of each of them is soon asked."""


def slice_of_made(value: Value) -> Value | None:
    """slice(f(x, y))  ->  f(slice(x), slice(y))   and slice(iota(n), a .. b)  ->  iota(b - a) + a"""
    (x,) = value.args
    if any(step != 1 for step in value.params["step"]) or not _is_made(x):
        return None
    if x.prim == "iota":
        positions = make("iota", size=value.shape[0], dtype=x.dtype)
        first = make("full", value=value.params["start"][0], shape=value.shape, dtype=x.dtype)
        return make("add", positions, first)
    if PRIMS[x.prim].family != "elementwise":
        return None
    return make(x.prim, *(make("slice", a, **value.params) for a in x.args), **x.params)


def _is_made(value: Value) -> bool:
    """True of positions and numbers, and of what is computed of them element by element."""
    known, left = {value}, [value]
    while left:
        node = left.pop()
        family = PRIMS[node.prim].family
        if node.prim not in ("iota", "full", "broadcast") and family != "elementwise":
            return False
        new = set(node.args) - known
        known |= new
        left += new
        if len(known) > MOST_NODES:
            return False
    return True


made: Rules = {"slice": (slice_of_made,)}
