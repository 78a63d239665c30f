"""A scheduled axis program to a kernel: coordinates, then values on demand, phase by phase, then the finish.

Only the coordinates differ between the roles of an axis; everything else is written once:

    kernel scope   grid coordinates, what no loop changes, accumulators
      walk         one turn per item of a persistent program
        chunks     one nest of loops per phase and set of row axes
    finish         the last program to arrive adds the partial sums, in order
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import sympy

from ...ir.switches import is_on
from ...ir.types import Size, product
from ..kernel import ALL_REGISTERS, MOST_REGISTERS, Kernel, Scalar, Target
from ..program.axes import Axis, Program
from ..program.op_counts import multiplied_in, operations_of
from ..program.sizes import Hints, evaluate_size, tidy
from ..schedule.schedule import Schedule
from .access.addresses import Addresses
from .access.aligned_rows import AlignedRows
from .access.buffers import Buffers
from .access.coordinates import Coordinates
from .access.index_checks import IndexChecks
from .access.levels import Levels
from .access.loads import Loads, padding_of, row_vectors
from .access.strided_pairs import StridedPairs
from .access.tile_axes import TileAxes, name_axes
from .access.traffic import Traffic, traffic_of
from .access.two_tiles import in_two_tiles
from .context import PROGRAM_ID, Context
from .loop_nests import LoopNests
from .names import MULTIPLE, Names
from .prelude import HELPERS
from .reductions.direct_partials import DirectPartials
from .reductions.final_reduction import FinalReductions
from .reductions.folding import Folding
from .reductions.lane_accumulators import LaneAccumulators
from .reductions.online_sums import OnlineSums
from .reductions.partial_slots import PartialSlots
from .reductions.pieces import RowPieces
from .reductions.row_ends import RowEnds
from .reductions.strips import RowWords
from .row_passes import RowPasses
from .statements import (
    Accumulate,
    Expr,
    For,
    Scope,
    Statement,
    binary,
    check,
    literal,
    name,
    prune,
    read_names,
    render,
)
from .stores import Stores
from .values import Values
from .walk import Walk

NameAxes = Callable[[Schedule, Names], Mapping[Axis, str]]
ENOUGH = 168
"""Registers of a thread."""


class Emitter:
    """The parts of one kernel under construction, from the ground up; each holds what it knows, and those it asks."""

    def __init__(
        self,
        program: Program,
        plan: Schedule,
        target: Target,
        hints: Hints,
        label: str,
        name_axes: NameAxes = name_axes,
        block_sizes: Mapping[Axis, int] | None = None,
    ) -> None:
        context = self.context = Context(program, plan, target, hints, label)
        # Where a program is, and the memory that it reads
        self.buffers = Buffers(program, context.names)
        self.tile = TileAxes(context, name_axes(plan, context.names), block_sizes or plan.tile)
        self.coords = Coordinates(context, self.tile)
        self.levels = Levels(context, self.coords)
        self.addresses = Addresses(context, self.buffers, self.tile, self.coords, self.levels)
        self.rows = AlignedRows(context, self.tile, self.coords, self.addresses)
        padding = padding_of(program, plan.copies)
        self.loads = Loads(context, self.buffers, self.tile, self.coords, self.addresses, padding)
        self.pairs = StridedPairs(context, self.tile, self.coords, self.levels, self.addresses, self.loads)
        # What it computes and stores
        self.checks = IndexChecks(context, self.coords)
        self.folding = Folding(context, self.tile, self.coords, self.loads)
        self.values = Values(
            context, self.buffers, self.tile, self.levels, self.addresses, self.loads, self.checks, self.pairs,
            self.folding,
        )  # fmt: skip
        self.stores = Stores(context, self.tile, self.coords, self.levels, self.addresses, self.pairs, self.values)
        # Loops, and what is summed over them
        self.nests = LoopNests(context, self.tile, self.coords, self.rows)
        self.walk = Walk(context, self.coords)
        online = OnlineSums(context, self.folding, self.values)
        lanes = LaneAccumulators(context, self.folding, self.values, online)
        slots = PartialSlots(context, self.addresses, self.rows, self.folding)
        directs = DirectPartials(context, self.addresses, self.folding, self.values, self.walk)
        words = RowWords(context, self.buffers, self.tile, self.walk, lanes)
        self.finals = FinalReductions(context, self.folding, self.rows, self.nests, self.stores, slots, directs, words)
        self.pieces = RowPieces(context, self.buffers, self.walk, self.nests, slots, lanes)
        self.passes = RowPasses(
            context, self.coords, self.levels, self.loads, self.nests, self.stores, lanes, self.finals, self.pieces,
            RowEnds(context, self.coords, self.folding, self.values),
        )  # fmt: skip

    def traffic(self) -> Traffic:
        """Bytes that the kernel moves."""
        return traffic_of(self.context, self.buffers, self.loads.passes)


def kernel_of(program: Program, plan: Schedule, target: Target, hints: Hints, label: str) -> Kernel:
    """One kernel for a scheduled program."""
    emitter = Emitter(program, plan, target, hints, label)
    emitter.loads.vectors = row_vectors(program, plan)
    if plan.programs is None:
        _emit_grid(emitter)
    else:
        _emit_walk(emitter)
    return assemble(emitter, emitter.traffic())


# ------------------------------------------------------------------ the tree of the kernel
def _emit_grid(emitter: Emitter) -> None:
    """Each program is at one block of the grid."""
    context, coords, plan = emitter.context, emitter.coords, emitter.context.plan
    _hold_rows(emitter)
    # Without a program there is no store: an output with fewer axes than the grid would keep what it held
    if any(set(plan.grid) - set(s.axes) for s in context.program.sinks):
        emitter.walk.require_nonzero(a.size for a in plan.grid)
    axes = [a for a in plan.grid if not coords.is_one_block(a)]
    if axes:
        pid = PROGRAM_ID if len(axes) == 1 else context.number_program()
        emitter.nests.set_from_flat(axes, pid, context.top, 0)
    _set_aligned_rows(emitter, context.top)
    emitter.passes.emit()


def _emit_walk(emitter: Emitter) -> None:
    """for item in this program's share: the body; then the finish."""
    context, walk, plan = emitter.context, emitter.walk, emitter.context.plan
    top, nests = context.top, emitter.nests
    _hold_rows(emitter)
    strip, part = walk.begin()
    # Rows of one program that begin alike are set up once, before the walk; others in each turn
    begin_alike = plan.step > 1
    if begin_alike:
        variable, over = walk.loop(part)
        walk.set_first_row(*plan.walk)
    nests.set_from_flat(plan.grid, strip, top, 0)
    if begin_alike:
        _set_aligned_rows(emitter, top)
    body = context.body = Scope(1, top)
    if not begin_alike:
        variable, over = walk.loop(part)
    nests.set_from_flat(plan.walk, walk.item(variable), body, 1)
    if not begin_alike:
        _set_aligned_rows(emitter, body)
    emitter.passes.emit()
    top.body.append(For(variable, over, body.body))
    # From here on values are computed in the scopes of the finish, by the last program alone
    if plan.final:
        top.closed = True
        emitter.finals.finish()
    if plan.pieces > 1:
        emitter.pieces.clear()


def _hold_rows(emitter: Emitter) -> None:
    """Row axes that the program covers from end to end."""
    plan = emitter.context.plan
    for axis in plan.whole_axes if plan.chunked else plan.row:
        if plan.chunked or not emitter.rows.covers(axis):
            emitter.coords.set_whole(axis)


def _set_aligned_rows(emitter: Emitter, scope: Scope) -> None:
    """The same from a boundary on, which depends on the row."""
    plan = emitter.context.plan
    for axis in () if plan.chunked else filter(emitter.rows.covers, plan.row):
        emitter.rows.set_row(axis, scope)


# ------------------------------------------------------------------ the text
def assemble(emitter: Emitter, traffic: Traffic) -> Kernel:
    """The kernel of a complete tree: what no store needs is dropped, every name and mask is checked."""
    context, plan = emitter.context, emitter.context.plan
    sizes, label = context.sizes, context.label
    # Masks, lanes and offsets are emitted before it is known whether an access reads them
    body = prune(context.top.body, set())
    if plan.tail:
        body = in_two_tiles(context, body, emitter.tile.block(plan.order[-1]).text)
    read = read_names(body)
    body = _kept_multiples(context, read) + body
    read |= read_names(body)
    # Arguments are those that the text reads; pointers are all there
    pointers = emitter.buffers.pointers()
    scalars = [Scalar(argument, value) for value, argument in sizes.scalars.items() if argument in read]
    constants = {argument: value for argument, value in sizes.constants.items() if argument in read}
    arguments = [*(p.name for p in pointers), *(s.name for s in scalars), *constants]
    # An undefined name or a missing mask is a fault of this package: it is found before any compiler runs
    check(body, {*arguments, *HELPERS, "tl", "libdevice", "range", "float"}, label)
    head = ", ".join(f"{a}: tl.constexpr" if a in constants else a for a in arguments)
    source = "\n".join(["@triton.jit", f"def {label}({head}):", *render(body)]) + "\n"
    grid = tidy(product([plan.programs, plan.strips, plan.pieces])) if plan.programs is not None else tidy(plan.strips)
    guards = tuple(g for g in sizes.guards if g != sympy.true)
    return Kernel(
        label, source, (*pointers, *scalars), dict(constants), grid, plan.warps, plan.stages,
        tuple(emitter.buffers.scratch), {}, guards, traffic.reads, traffic.writes, traffic.cached,
        tuple(p.name for p in pointers if p.name in emitter.buffers.aligned), operations_of(context.program),
        context.target.fast, any(g.has(sympy.Mod) for g in sizes.guards),
        multiplied=multiplied_in(context.program) if "tl.dot(" in source else 0,
        sharing=plan.strips if emitter.finals.words.pointers else 1, roomy=_programs_of_a_unit(context, grid),
    )  # fmt: skip


def _programs_of_a_unit(context: Context, grid: Size) -> int:
    """Programs on each unit, where all run at once and wait for one another; 0 of any others."""
    if context.plan.pieces == 1:
        return 0
    return max(1, -(-evaluate_size(grid, context.hints) // context.target.units))


def has_all_registers(kernel: Kernel, context: Context) -> bool:
    """A multiprocessor holds its share of the programs, whatever registers these take."""
    share = -(-evaluate_size(kernel.grid, context.hints) // context.target.units)
    return share * kernel.num_warps * context.target.warp * MOST_REGISTERS <= ALL_REGISTERS


def with_enough_registers(kernel: Kernel) -> Kernel:
    """A kernel whose compiler may not spill so that one more program fits on a multiprocessor."""
    return replace(kernel, roomy=max(1, ALL_REGISTERS // (32 * kernel.num_warps * ENOUGH)))


def _kept_multiples(context: Context, read: set[str]) -> list[Statement]:
    """N = N // 8 * 8: lengths and strides that are multiples now have to stay so, or another kernel serves.

    The length of a row held whole is a multiple of a constant, 8 or 1: one text serves both.
    """
    sizes, bounded, width = context.sizes, [a.size for a in context.plan.pinned], context.sizes.width
    statements: list[Statement] = []
    for size, label in sizes.scalars.items() if is_on("multiples") else ():
        if label not in read or label not in sizes.wide:
            continue
        is_multiple = evaluate_size(size, context.hints) % width == 0
        if is_multiple:
            sizes.guards[sympy.Eq(sympy.Mod(size, width), 0)] = None
        if size in bounded:
            allowed = sizes.fixed(context.names.fresh(f"{MULTIPLE}{label}"), width if is_multiple else 1)
            statements.append(_multiple(label, allowed, "accesses are as wide as it allows"))
        elif is_multiple:
            statements.append(_multiple(label, literal(width), f"a multiple of {width}: accesses are wide"))
    return statements


def _multiple(label: str, width: Expr, comment: str) -> Statement:
    return Accumulate(label, "=", binary("*", binary("//", name(label), width), width), comment)
