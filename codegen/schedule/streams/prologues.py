"""Row numbers that a walk makes before it begins, and stores: neither it nor a kernel behind it needs another launch.

    row kernel:   delta[i] = sum(g[i] * out[i])                walk:   store delta = sum(g * out); barrier
    walk:         load delta; for block of keys: ..       ->           load delta; for block of keys: ..

Each row is one program's, which has it whole along the depth. It reads what it has stored: a row that it had summed
itself would have to change layouts, and stay in registers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from ...program.axes import REDUCTIONS, Axis, Sink, Term, terms_below
from ..separation.algebra import is_tile_product
from .roles import Roles

Walked = defaultdict[Any, list[tuple[Sink, Roles | None]]]
"""Sinks by what they walk, None: nothing."""


def with_prologues(walks: Walked) -> Walked:
    """Stores of row numbers go to the walk that reads or makes them, where its programs may make them first."""
    stores = walks.pop(None, [])
    for sink, _ in stores:
        home = next((k for k, members in walks.items() if k is not None and _is_prologue(sink, members)), None)
        walks[home].append((sink, None))
    return walks


def _is_prologue(sink: Sink, members: Sequence[tuple[Sink, Roles | None]]) -> bool:
    """Each number is stored by one program, which alone reads or makes it; what it sums is whole in its tiles."""
    roles = next(r for _, r in members if r is not None)
    terms = terms_below(t for s, _ in members for t in s.terms)
    read = [t.param.place for t in terms if t.op == "load" and t.param.ref == sink.ref]
    is_own = not roles.keeps_stream and _lengths(sink.axes) == _lengths((roles.row, *roles.grid))
    if not is_own or not (read or sink.value in terms) or any(place != sink.place for place in read):
        return False
    reduced = {a for t in terms_below(sink.terms) if t.op in REDUCTIONS for a in t.param}
    return reduced <= set(_whole(members, terms)) - roles.over


def _lengths(axes: Sequence[Axis]) -> set[Axis]:
    return {a for a in axes if a.size != 1}


def _whole(members: Sequence[tuple[Sink, Roles | None]], terms: Sequence[Term]) -> Iterator[Axis]:
    """What products of tiles are contracted along, and the columns of what is accumulated."""
    yield from (a for t in terms if is_tile_product(t) for a in t.param)
    yield from (a for s, _ in members for a in s.axes)
