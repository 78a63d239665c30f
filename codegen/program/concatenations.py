"""Concatenations: where their pieces are, and those of many computed pieces, which are stored piece by piece.

    stack([h0, h1, .. h127])      128 stores, each where its piece is computed; not one of 127 choices
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from ...ir import Value
from ...ir.prims import PRIMS
from .axes import Index, Part
from .sizes import same, tidy

MAX_PIECES = 16
"""A concatenation of more computed pieces is stored piece by piece: to choose among them, all would be computed."""
MOST_MADE = 64
"""Values among which the steps of a loop are looked for."""


def pieces(value: Value) -> list[Part]:
    """The places of a concatenation's pieces."""
    dim = value.params["axis"]
    sizes = [x.shape[dim] for x in value.args]
    starts = accumulate(sizes[:-1], lambda start, size: tidy(start + size), initial=0)
    return [Part(dim, start, size) for start, size in zip(starts, sizes, strict=True)]


def stored_pieces(value: Value) -> list[Part]:
    """The places of its pieces where a concatenation of many is stored piece by piece, else none.

    Alike, so that one kernel walks them all; and computed: of what is only read a choice reads no more. What a loop
    gives step by step is stored as it comes, whatever is beside it.
    """
    if value.prim == "cat" and any(loop_behind(x) for x in value.args):
        return pieces(value)
    if value.prim != "cat" or len(value.args) <= MAX_PIECES or all(_is_moved(x) for x in value.args):
        return []
    parts = pieces(value)
    return parts if all(same(p.size, parts[0].size) for p in parts) else []


def parts_to_store(value: Value) -> list[tuple[Value, Part]]:
    """The pieces of a concatenation, or of one permuted, that is stored piece by piece, with their places in it."""
    dims = list(range(len(value.shape)))  # of the value, by dimension of what is looked at
    while (moved := moved_dims(value)) is not None:
        dims = [dims[d] if d >= 0 else -1 for d in moved]
        (value,) = value.args
    parts = [part._replace(dim=dims[part.dim]) for part in stored_pieces(value)]
    return list(zip(value.args, parts, strict=True)) if parts else []


def moved_dims(value: Value) -> list[int] | None:
    """The dimension of a value for each of its argument's, where it only moves them; -1 for one that is not there.

    A reshape moves those that are one long, and no other.
    """
    if value.prim == "permute":
        perm: tuple[int, ...] = value.params["perm"]
        return [perm.index(d) for d in range(len(perm))]
    if value.prim != "reshape":
        return None
    (x,) = value.args
    own, before = ([d for d, n in enumerate(v.shape) if n != 1] for v in (value, x))
    if [value.shape[d] for d in own] != [x.shape[d] for d in before]:
        return None
    place = dict(zip(before, own, strict=True))
    return [place.get(d, -1) for d in range(len(x.shape))]


def loop_behind(value: Value) -> Value | None:
    """The loop that gives this, which is moved about, or what this is made of element by element, and summed."""
    seen, todo = set[int](), [value]
    while todo and len(seen) < MOST_MADE:
        found = todo.pop()
        if found.prim in ("scan", "pick"):
            return found if found.prim == "scan" else found.args[0]
        is_made = found.prim == "sum" or PRIMS[found.prim].family == "elementwise" or _is_layout(found)
        if found.id not in seen and is_made:
            todo += found.args
        seen.add(found.id)
    return None


def _is_layout(value: Value) -> bool:
    return PRIMS[value.prim].family == "layout"


def _is_moved(value: Value) -> bool:
    while PRIMS[value.prim].family == "layout" and len(value.args) == 1:
        (value,) = value.args
    return PRIMS[value.prim].family in ("input", "source")


def piece_at(place: Index, parts: Sequence[Part]) -> tuple[int, Index] | None:
    """The number of the piece in which a place provably lies, and the place in it."""
    bounds = place.bounds()
    if bounds is None:
        return None
    candidates = range(len(parts))
    if isinstance(bounds[0], int) and isinstance(parts[-1].start, int):
        near = bisect_right(parts, bounds[0], key=lambda p: p.start) - 1
        candidates = range(max(0, near), near + 1)
    shifted = ((k, place + tidy(-parts[k].start)) for k in candidates)
    return next(((k, inside) for k, inside in shifted if inside.is_within(parts[k].size)), None)
