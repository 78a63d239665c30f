"""A streamed kernel to text: where a program is; a pass over the stream for each turn of accumulation; then the stores.

for col_at in tl.range(start, stop, BLOCK_N):      blocks in which something is alive, masked where not all is
    s = tl.dot(q, tl.trans(k))
    highest = larger(top, row_max(s))
    acc = tl.dot(exp(s - highest), v, acc * exp(top - highest))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ....ir.types import ITEMSIZE, LOW_FLOATS, product
from ...kernel import Kernel, Target, Walk
from ...program.axes import Axis, Program, Sink
from ...program.sizes import Hints, cdiv, evaluate_size, power_of_two, tidy
from ...program.terms import TermTable
from ...schedule.schedule import Schedule
from ...schedule.separation.algebra import Algebra
from ...schedule.streams.accumulators import Accumulation
from ...schedule.streams.masks import Span
from ...schedule.streams.powers import with_powers_of_two
from ...schedule.streams.roles import Roles
from ...schedule.streams.skipped import span_of
from ...schedule.streams.tiles import StreamTile, schedule_of, tile_of
from ..access.descriptors import Descriptors
from ..access.traffic import Traffic, add_bytes
from ..emit import Emitter, assemble
from ..mathematics import fast_rules, rules_for
from ..names import Names
from ..statements import Barrier
from .bins import store_bins
from .passes import StreamPass
from .stream import Stream
from .values import uses_of
from .walk_facts import remarks_on, walk_of


def name_axes(roles: Roles, _plan: Schedule, names: Names) -> Mapping[Axis, str]:
    """Row and col over M and N, depths over D, E ..; the others are scalars."""
    spare = iter("DEFGHIJKLOPQRSTUVWXYZABC")
    words = {roles.row: ("row", "M"), roles.stream: ("col", "N"), roles.split: ("split", "SPLITS")}
    words |= dict.fromkeys(roles.bins[:1], ("bin", "BINS"))
    letters: dict[Axis, str] = {}
    for axis in (roles.row, roles.stream, *roles.depth, *roles.places, *roles.bins, *roles.outer, *roles.grid):
        word, letter = words.get(axis) or ("", next(spare))
        letters[axis], axis.name = letter, word or letter.lower()
        names.fresh(letter), names.fresh(axis.name)
    return letters


def traffic_of_stream(emitter: Emitter, roles: Roles, tile: StreamTile) -> Traffic:
    """Each place once from memory; what the stream reads is read by every block of rows, from L2 but for the first."""
    traffic = emitter.traffic()
    again = tidy(cdiv(roles.row.size, tile.blocks[roles.row]) - 1)
    for load in (t for t in emitter.context.program.terms if t.op == "load" and roles.stream in t.axes):
        if roles.row not in load.axes and again != 0:
            once = tidy(product(a.size for a in load.axes) * ITEMSIZE[load.dtype])
            add_bytes(traffic.cached, emitter.buffers.labels[load.param.ref], tidy(once * again))
    # row numbers that the program has stored itself
    own = [label for label in traffic.reads if label in traffic.writes]
    traffic.cached.update((label, traffic.reads.pop(label)) for label in own)
    return traffic


@dataclass(frozen=True)
class StreamPlan:
    """The sums of a streamed kernel as they are emitted, the part of the stream that each pass walks, and the tile."""

    sums: Accumulation
    spans: tuple[Span, ...]
    tile: StreamTile


def plan_of_stream(
    table: TermTable, sums: Accumulation, roles: Roles, target: Target, hints: Hints
) -> StreamPlan:  # fmt: skip
    """The plan of one kernel for sinks that share rows and a stream."""
    algebra = Algebra(table, roles.is_fixed)
    sums = with_powers_of_two(algebra, sums, roles)
    spans = tuple(span_of(algebra, sums.of_pass(turn), roles, hints) for turn in range(sums.passes))
    return StreamPlan(sums, spans, tile_of(roles, sums, target, hints, any(s.is_bounded for s in spans)))


def kernel_of_stream(
    table: TermTable, plan: StreamPlan, roles: Roles, target: Target, hints: Hints, label: str
) -> Kernel:  # fmt: skip
    """The kernel of a plan."""
    sums, tile = plan.sums, plan.tile
    program = Program(sums.sinks)
    blocks = {**tile.blocks, **{a: power_of_two(evaluate_size(a.size, hints)) for a in roles.bins}}
    emitter = Emitter(program, schedule_of(roles, tile), target, hints, label, partial(name_axes, roles), blocks)
    emitter.loads.padding.clear()  # operands of products are loads, too: zeros
    emitter.context.names.release(["k"])  # of products' loops, which are not here: users call their keys so
    is_low = any(t.op == "load" and t.dtype in LOW_FLOATS for t in program.terms)
    rules = rules_for(target.kind, target.fast, is_low)
    stream = Stream(emitter, table, roles, sums)
    if emitter.context.plan.accelerated:
        stream.values.descriptors = Descriptors(emitter.addresses, roles.stream, stream.shapes.first_in_32_bits)
    stream.values.rules = {**rules, "exp2": fast_rules["exp2"]} if is_low else rules
    _emit(stream, plan.spans)
    kernel, walk = assemble(emitter, traffic_of_stream(emitter, roles, tile)), walk_of(stream, plan.spans, tile)
    return replace(kernel, source=_with_remarks(kernel.source, walk), walk=walk, roomy=tile.roomy)


def _with_remarks(source: str, walk: Walk) -> str:
    """The kernel's text, which says first what it does."""
    decorator, head, body = source.split("\n", 2)
    remarks = "".join(f"    # {line}\n" for line in remarks_on(walk))
    return f"{decorator}\n{head}\n{remarks}{body}"


def _emit(stream: Stream, spans: Sequence[Span]) -> None:
    """Where the program is; stores of what is made of rows alone; one pass after the other; the other stores."""
    stream.set_coordinates(any(s.grows_with_rows for s in spans))
    first = [s for s in stream.context.program.sinks if stream.is_of_rows(s)]
    loaded = {t.param.ref for t in stream.context.program.terms if t.op == "load"}
    for sink in first:
        _emit_stores(stream, [sink])
        if sink.ref in loaded:
            stream.context.top.body.append(Barrier())
    for turn, span in enumerate(spans):
        stream.context.sizes.guards.update(dict.fromkeys(span.guards))
        StreamPass(stream, stream.sums.of_pass(turn), span).emit()
    _emit_stores(stream, [s for s in stream.context.program.sinks if s not in first])


def _emit_stores(stream: Stream, sinks: Sequence[Sink]) -> None:
    """What is known by now."""
    stream.values.uses = uses_of([t for s in sinks for t in s.terms], stream.labels)
    for sink in sinks:
        stream.reduce_depths(sink.terms)
        if sink.by is None:
            stream.store(sink)
        else:
            store_bins(stream, sink)
