"""Bytes that a kernel moves, buffer by buffer, as expressions over the sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ....ir.types import ITEMSIZE, Size, product
from ...kernel import Ref
from ...program.axes import Axis, Term
from ...program.sizes import divide, evaluate_size, nonnegative, tidy
from ..context import Context
from .buffers import Buffers

NEAR = 2
"""Steps of a loop after which what was read is still in the cache."""
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
    for load, is_again in _loads(context):
        moved, label = tidy(_places_read(load) * ITEMSIZE[load.dtype]), buffers.labels[load.param.ref]
        add_bytes(traffic.cached if is_again else traffic.reads, label, moved)
        # The first pass comes out of memory, the others out of the cache
        again = passes.get(load, 0) - (not plan.shared)
        if again > 0 and set(plan.walk) & load.axes:
            stays = _bytes_of_item(load, context) <= context.target.l2
            add_bytes(traffic.cached if stays else traffic.reads, label, tidy(again * moved))
    _keep_tables(traffic, context, buffers)
    for sink in context.program.sinks:
        moved = tidy(_places_between(sink.axes, sink.within) * ITEMSIZE[sink.dtype])
        add_bytes(traffic.writes, buffers.labels[sink.ref], moved)
    _keep_results(traffic, context, buffers)
    for buffer in buffers.scratch:
        if not buffer.zeroed:
            moved, label = tidy(product(buffer.shape) * ITEMSIZE[buffer.dtype]), f"{buffer.name}_ptr"
            stays = evaluate_size(moved, context.hints) <= context.target.l2 // WORKSPACE
            (traffic.cached if stays else traffic.reads)[label] = traffic.writes[label] = moved
    return traffic


def _bytes_of_item(load: Term, context: Context) -> int:
    """What a load reads of the rows that are walked at a time."""
    plan = context.plan
    own = product(a.size for a in load.axes if a in plan.row)
    beside = product(plan.tile[a] for a in load.axes if a in plan.tile and a not in plan.row)
    return evaluate_size(own, context.hints) * int(beside) * ITEMSIZE[load.dtype]


def _loads(context: Context) -> Iterator[tuple[Term, bool]]:
    """Each load, and whether the program has what it reads in the cache."""
    plan, loads = context.plan, [t for t in context.program.counted if t.op == "load"]
    held = frozenset(() if plan.chunked else plan.row) | {a for a, n in plan.tile.items() if _is_whole_in(n, a)}
    distinct = {(t.param, t.args): t for t in reversed(loads)}
    reaches: list[_Reach] = []
    # what is read whole comes before parts of it
    for load in sorted(reversed(distinct.values()), key=lambda t: (bool(t.args), -len(t.axes))):
        reach = _Reach.of(load, held)
        is_near = not load.param.indirect and any(reach.is_within(o) or reach.is_step_of(o) for o in reaches)
        yield load, is_near or load in context.program.cached or _is_of_row(load, context)
        if not load.args:
            reaches.append(reach)


def _is_whole_in(lanes: int, axis: Axis) -> bool:
    """One tile holds the axis, at every size."""
    return isinstance(axis.size, int) and axis.size <= lanes


def add_bytes(counts: dict[str, Size], label: str, moved: Size) -> None:
    """Count so many bytes more."""
    counts[label] = tidy(counts.get(label, 0) + moved)


@dataclass(frozen=True)
class _Reach:
    """The places of a load in one program: those beside one another along axes that it holds whole.

    along: by stride the first of them, and the one behind the last. What reads them along other axes, transposed or
    some places further, or reads one of them alone, finds them in the cache; so does what reads them a few steps later,
    or earlier.
    """

    ref: Ref
    beside: frozenset[tuple[Axis, Size]]
    along: Mapping[Size, tuple[Size, Size]]
    offset: Size
    is_guarded: bool

    @classmethod
    def of(cls, load: Term, held: frozenset[Axis]) -> _Reach:
        place, (low, high) = load.param.place, _bounds(_guards(load))
        along = {c: (low.get(a, 0), high.get(a, a.size)) for a, c in place.terms if a in held}
        beside = frozenset(t for t in place.terms if t[0] not in held)
        return cls(load.param.ref, beside, along, place.offset, bool(load.args))

    def is_within(self, other: _Reach) -> bool:
        """Each of its places is one of the other's."""
        if not other.along or (self.ref, self.beside) != (other.ref, other.beside) or {*self.along} - {*other.along}:
            return False
        further = tidy(self.offset - other.offset)
        moves = [{c: n} for c in other.along if (n := divide(further, c)) is not None]
        return any(self._fits(other, move) for move in (moves if further != 0 else [{}]))

    def is_step_of(self, other: _Reach) -> bool:
        """Its places are those that the other has a few steps before or later; those that it has not are guarded."""
        if not self.is_guarded or (self.ref, self.beside, self.along) != (other.ref, other.beside, other.along):
            return False
        further = tidy(self.offset - other.offset)
        steps = [divide(further, c) for a, c in self.beside if a.turn]
        return any(isinstance(n, int) and abs(n) <= NEAR for n in steps)

    def _fits(self, other: _Reach, move: Mapping[Size, Size]) -> bool:
        """Along each stride the places, so many further, lie between those of the other."""
        pairs = ((self.along.get(c, (0, 1)), whole, move.get(c, 0)) for c, whole in other.along.items())
        return all(
            nonnegative(tidy(low + n - first)) and nonnegative(tidy(behind - high - n))
            for (low, high), (first, behind), n in pairs
        )


def _keep_tables(traffic: Traffic, context: Context, buffers: Buffers) -> None:
    """Of a small table that much is gathered from the bytes that it has: the rest comes out of the cache."""
    for load in (t for t in context.program.counted if t.op == "load" and t.param.indirect):
        if load.node is None:
            continue
        label, whole = buffers.labels[load.param.ref], tidy(load.node.aval.nbytes)
        moved = traffic.reads.get(label, 0)
        if evaluate_size(moved, context.hints) > evaluate_size(whole, context.hints):
            traffic.reads[label] = whole
            add_bytes(traffic.cached, label, tidy(moved - whole))


def _keep_results(traffic: Traffic, context: Context, buffers: Buffers) -> None:
    """What is stored under conditions has no more bytes than there are: each place is stored once."""
    for sink in (s for s in context.program.sinks if s.within and s.mode == "store" and s.ref.kind == "output"):
        label, whole = buffers.labels[sink.ref], tidy(sink.node.aval.nbytes)
        if evaluate_size(traffic.writes[label], context.hints) > evaluate_size(whole, context.hints):
            traffic.writes[label] = whole


def _is_of_row(load: Term, context: Context) -> bool:
    """An index picks from a row that the program reads anyway: out of the cache."""
    access, row = load.param, set(context.plan.row)
    if not access.indirect:
        return False
    rows = [t.param for t in context.program.terms if t.op == "load" and t.param.ref == access.ref and not t.args]
    walked = (tuple(t for t in r.place.terms if t[0] not in row) for r in rows if row & set(r.place.walked))
    return access.place.terms in walked


def _places_read(load: Term) -> Size:
    return _places_between(load.axes, _guards(load))


def _places_between(axes: Iterable[Axis], guards: Iterable[Term]) -> Size:
    """The number of places along axes: of one that guards bound, those between the bounds."""
    low, high = _bounds(guards)
    return tidy(product(high.get(a, a.size) - low.get(a, 0) for a in axes))


def _guards(load: Term) -> tuple[Term, ...]:
    return load.args[len(load.param.indirect) :]


def _bounds(guards: Iterable[Term]) -> tuple[dict[Axis, Size], dict[Axis, Size]]:
    """By axis that guards bound the first place, and the one behind the last."""
    low: dict[Axis, Size] = {}
    high: dict[Axis, Size] = {}
    for guard in guards:
        if guard.op in ("ge", "lt", "le") and (bound := _bound_of_guard(guard)) is not None:
            axis, limit = bound
            (low if guard.op == "ge" else high)[axis] = limit + int(guard.op == "le")
    return low, high


def _bound_of_guard(guard: Term) -> tuple[Axis, Size] | None:
    """axis + offset < number  ->  (axis, number - offset)"""
    place, limit = guard.args
    if place.op != "index" or limit.op != "const" or len(place.param.terms) != 1:
        return None
    ((axis, coefficient),) = place.param.terms
    return (axis, tidy(limit.param - place.param.offset)) if coefficient == 1 else None
