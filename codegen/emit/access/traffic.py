"""Bytes that a kernel moves, buffer by buffer, as expressions over the sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ....ir.types import ITEMSIZE, Size, product
from ...program.axes import Axis, Term
from ...program.sizes import evaluate_size, tidy
from ..context import Context
from .buffers import Buffers

WORKSPACE = 8
"""Partial sums are read back from L2 where they fill at most one part in so many of it."""


@dataclass(frozen=True)
class Traffic:
    """By name of the pointer: bytes from memory, bytes to memory, bytes that are read once more, out of L2."""

    reads: dict[str, Size] = field(default_factory=dict)
    writes: dict[str, Size] = field(default_factory=dict)
    cached: dict[str, Size] = field(default_factory=dict)


def traffic_of(context: Context, buffers: Buffers, passes: Mapping[Term, int]) -> Traffic:
    """Every distinct place once; what a row in flight is read again for comes out of L2."""
    traffic, plan = Traffic(), context.plan
    counted: set[object] = set()
    for load in (t for t in context.program.counted if t.op == "load"):
        if (load.param, load.args) in counted:
            continue
        counted.add((load.param, load.args))
        moved, label = tidy(_places_read(load) * ITEMSIZE[load.dtype]), buffers.labels[load.param.ref]
        add_bytes(traffic.cached if _is_of_row(load, context) else traffic.reads, label, moved)
        # The first pass comes out of memory, the others out of the cache
        again = passes.get(load, 0) - (not plan.shared)
        if again > 0 and set(plan.walk) & load.axes:
            add_bytes(traffic.cached, label, tidy(again * moved))
    for sink in context.program.sinks:
        moved = tidy(product(a.size for a in sink.axes) * ITEMSIZE[sink.dtype])
        add_bytes(traffic.writes, buffers.labels[sink.ref], moved)
    for buffer in buffers.scratch:
        if not buffer.zeroed:
            moved, label = tidy(product(buffer.shape) * ITEMSIZE[buffer.dtype]), f"{buffer.name}_ptr"
            stays = evaluate_size(moved, context.hints) <= context.target.l2 // WORKSPACE
            (traffic.cached if stays else traffic.reads)[label] = traffic.writes[label] = moved
    return traffic


def add_bytes(counts: dict[str, Size], label: str, moved: Size) -> None:
    """Count so many bytes more."""
    counts[label] = tidy(counts.get(label, 0) + moved)


def _is_of_row(load: Term, context: Context) -> bool:
    """An index picks from a row that the program reads anyway: out of the cache."""
    access, row = load.param, set(context.plan.row)
    if not access.indirect:
        return False
    rows = [t.param for t in context.program.terms if t.op == "load" and t.param.ref == access.ref and not t.args]
    walked = (tuple(t for t in r.place.terms if t[0] not in row) for r in rows if row & set(r.place.walked))
    return access.place.terms in walked


def _places_read(load: Term) -> Size:
    """The number of places that a load reads: along an axis that its guards bound, those between the bounds."""
    low: dict[Axis, Size] = {}
    high: dict[Axis, Size] = {}
    for guard in load.args[len(load.param.indirect) :]:
        if guard.op in ("ge", "lt", "le") and (bound := _bound_of_guard(guard)) is not None:
            axis, limit = bound
            (low if guard.op == "ge" else high)[axis] = limit + int(guard.op == "le")
    return tidy(product(high.get(a, a.size) - low.get(a, 0) for a in load.axes))


def _bound_of_guard(guard: Term) -> tuple[Axis, Size] | None:
    """axis + offset < number  ->  (axis, number - offset)"""
    place, limit = guard.args
    if place.op != "index" or limit.op != "const" or len(place.param.terms) != 1:
        return None
    ((axis, coefficient),) = place.param.terms
    return (axis, tidy(limit.param - place.param.offset)) if coefficient == 1 else None
