"""Rows that begin anywhere, read from the 16-byte boundary below: wide accesses, whose outermost lanes are neighbours.

shift = row * N % 8                       elements between the boundary and the row
near  = lane // 8 * 8 < N + shift - ..    groups of 16 bytes that the row touches: what is read
whole = ..                                groups that lie inside it: what is written wide, the edges apart
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ...ir.types import Size
from ..program.axes import Axis, Index, Program
from ..program.sizes import Hints, evaluate_size

Begin: TypeAlias = "tuple[tuple[tuple[Axis, Size], ...], Size]"
GROUP = 16
"""Bytes of the widest access."""


@dataclass(frozen=True)
class Slide:
    """Accesses along `axis` that begin at offset + terms, in elements; `group` of them are at most 16 bytes."""

    axis: Axis
    terms: tuple[tuple[Axis, Size], ...]
    offset: Size
    group: int

    def holds(self, place: Index, plain: bool) -> bool:
        """An access is one of these. `plain`: it has no indices or conditions of its own."""
        return plain and not place.values and _key(place, self.axis) == (self.terms, self.offset)


def slide_of(program: Program, axis: Axis, size: Mapping[Axis, int], hints: Hints) -> Slide | None:
    """The accesses that move most of the bytes, where they begin at odd places now."""
    moved: dict[Begin, int] = {}
    widest: dict[Begin, int] = {}
    for t in program.traffic():
        if t.plain and (key := _key(t.place, axis)) is not None:
            moved[key] = moved.get(key, 0) + t.itemsize * math.prod(size[a] for a in t.axes)
            widest[key] = max(widest.get(key, 1), t.itemsize)
    if not moved:
        return None
    terms, offset = max(moved, key=lambda k: moved[k])
    group = GROUP // widest[terms, offset]
    steps = [evaluate_size(n, hints) for n in (offset, *(c for _, c in terms))]
    odd = any(n % group for n in steps) and min(steps) >= 0
    return Slide(axis, terms, offset, group) if odd and group > 1 else None


def _key(place: Index, axis: Axis) -> Begin | None:
    """Where an access along the axis, one element after the other, begins."""
    if dict(place.terms).get(axis) != 1 or len(place.terms) == 1:
        return None
    return tuple(sorted((t for t in place.terms if t[0] is not axis), key=lambda t: t[0].order)), place.offset
