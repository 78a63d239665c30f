"""A matrix product and what surrounds it, as one kernel: a tile of the result per program, a loop along what is summed.

    for k: acc = tl.dot(prologue of x[row, k], prologue of y[k, col], acc)     sums in float32
    epilogue(acc, bias[col], residual[row, col], ..) -> stores

Tiles that share operands run in groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import sympy

from ...ir import Graph
from ...ir.switches import is_on
from ...ir.types import ITEMSIZE, LOW_FLOATS, product
from ..kernel import Kernel, Kernels, Ref, Target
from ..program.axes import Axis, Goal, Materialize, Memory, Program, Term, terms_below
from ..program.sinks import build_sinks
from ..program.sizes import Hints, cdiv, evaluate_size, tidy
from ..program.terms import TermTable
from ..program.unify import unify
from ..schedule.schedule import Schedule
from .access.coordinates import Coord
from .access.traffic import Traffic, add_bytes
from .context import name_of
from .emit import Emitter, assemble
from .mathematics import narrow
from .names import Names
from .product_schedule import Roles, Tile, refuse, roles_of, schedule_of, source_of, tile_of
from .statements import Accumulate, Expr, For, Let, Scope, binary, call, literal, name, total

GROUP = 8
"""Rows of tiles that run together: their operands are in L2."""
PRECISION, EXACTLY = "PRECISION", "ieee"
"""The constant of kernels that multiply float32, and its value where torch's setting allows no TF32."""


class ProductLoop:
    """The sum along k, between the coordinates of a tile of the result and its epilogue."""

    def __init__(self, emitter: Emitter, roles: Roles, tile: Tile) -> None:
        self.emitter, self.context, self.tile = emitter, emitter.context, emitter.tile
        self.roles = roles
        self.is_one_turn = isinstance(roles.k.size, int) and roles.k.size <= tile.depth
        self.accumulator = self.context.names.fresh("acc")
        emitter.levels.fix(roles.total, 0)
        emitter.values.accumulated[roles.total] = name(self.accumulator)

    def emit(self) -> None:
        """Where the program is; the sum; what is made of it."""
        roles, top = self.roles, self.context.top
        self._set_coordinates()
        # A turn that is the only one needs no loop
        turn = Scope(0 if self.is_one_turn else 1, top)
        first = None
        if not self.is_one_turn:
            first = self.context.let(turn, "first_k", call("tl.cast", name("k_at"), literal("tl.int64")))
        left = self._operand(roles.left, (roles.row, roles.k), first, turn)
        right = self._operand(roles.right, (roles.k, roles.col), first, turn)
        # From here on the tile is that of the result
        self.tile.dims = (roles.row, roles.col)
        # The epilogue reads the accumulator in the place of the product
        self._emit_dot(left, right, turn)
        for sink in self.context.program.sinks:
            self.emitter.stores.store(sink, top)

    # ------------------------------------------------------------------ where a program is
    def _set_coordinates(self) -> None:
        """The program's number as batch, row and column of tiles."""
        top, coords = self.context.top, self.emitter.coords
        axes = [a for a in (self.roles.row, self.roles.col) if not coords.is_one_block(a)]
        number_ = self.context.number_program()
        if self.roles.batch:
            number_ = self._set_batch(number_, total("*", [self.tile.count(a) for a in axes]))
        numbers = self._grouped(number_) if len(axes) == 2 else (number_,) * len(axes)
        for axis, block in zip(axes, numbers, strict=True):
            coords.set_block(axis, block, top, 0)

    def _set_batch(self, number_: Expr, tiles: Expr | None) -> Expr:
        """The coordinates of the batch; returns the number of the tile within it."""
        let, top = self.context.let, self.context.top
        flat, tile = number_, number_
        if tiles is not None:
            tiles = let(top, "tiles", tiles)
            tile, flat = let(top, "tile", binary("%", number_, tiles)), binary("//", number_, tiles)
        for position, axis in reversed(list(enumerate(self.roles.batch))):
            element = binary("%", flat, self.tile.count(axis)) if position else flat
            self.emitter.coords.set_element(axis, element, top, 0)
            flat = binary("//", flat, self.tile.count(axis))
        return tile

    def _grouped(self, number_: Expr) -> tuple[Expr, Expr]:
        """GROUP rows of tiles column by column, then the next rows: the operands they share are read again from L2."""
        let, top = self.context.let, self.context.top
        rows, cols, group = self.tile.count(self.roles.row), self.tile.count(self.roles.col), name("GROUP")
        self.context.sizes.constants["GROUP"] = GROUP
        size = let(top, "in_group", binary("*", group, cols))
        above = let(top, "above", binary("*", binary("//", number_, size), group))
        height = let(top, "height", call("tl.minimum", binary("-", rows, above), group))
        inside = let(top, "place", binary("%", number_, size))
        return binary("+", above, binary("%", inside, height)), binary("//", inside, height)

    # ------------------------------------------------------------------ the sum
    def _operand(self, term: Term, dims: tuple[Axis, Axis], first: Expr | None, turn: Scope) -> Expr:
        """The tile of an operand in the dtype that is multiplied, zero beyond the end of the sum."""
        k = self.roles.k
        self.tile.dims = dims
        scope = Scope(turn.level, self.context.top, turn.body)
        lane = self.tile.lane(k)
        self.emitter.coords[k] = Coord(first, lane, self._inside_k(lane, first, scope), turn.level)
        term = source_of(term) if self.roles.dtype in LOW_FLOATS else term
        is_load = term.op == "load"
        value = self.emitter.values.read(term, scope) if is_load else self._prologue(term, scope)
        return self.context.let(scope, name_of(term) or ("x" if is_load else "operand"), value)

    def _inside_k(self, lane: Expr, first: Expr | None, scope: Scope) -> Expr | None:
        """The mask along the sum; none where whole turns cover it, or where guards see to that."""
        sizes, size, depth = self.context.sizes, self.roles.k.size, self.tile.block_sizes[self.roles.k]
        if evaluate_size(size, self.context.hints) % depth == 0 and (isinstance(size, int) or is_on("multiples")):
            if not isinstance(size, int):
                sizes.guards[sympy.Eq(sympy.Mod(size, depth), 0)] = None
            return None
        left = sizes.text(size) if first is None else binary("-", sizes.text(size), first)
        return self.context.let(scope, "inside_k", binary("<", lane, left))

    def _prologue(self, term: Term, scope: Scope) -> Expr:
        """A prologue; lanes beyond the end add nothing, whatever it makes of the zeros that were read there."""
        value, mask = self.emitter.values.compute(term, scope), self.emitter.coords[self.roles.k].mask
        if mask is not None and self.emitter.folding.pad(term, self.roles.k) != 0.0:
            value = call("tl.where", mask, value, literal("0.0"))
        return narrow(value, self.roles.dtype) if self.roles.dtype in LOW_FLOATS else value

    def _emit_dot(self, left: Expr, right: Expr, turn: Scope) -> None:
        """acc = tl.dot(left, right, acc), in a loop unless one turn is all."""
        context, top, k = self.context, self.context.top, self.roles.k
        precision, comment = self._precision(), context.comment(self.roles.total)
        if self.is_one_turn:
            top.body += [*turn.body, Let(self.accumulator, call("tl.dot", left, right, **precision), comment)]
            return
        dot = call("tl.dot", left, right, name(self.accumulator), **precision)
        turn.body.append(Accumulate(self.accumulator, "=", dot, comment))
        context.sizes.require_countable(k.size)
        stages = {"num_stages": literal(context.plan.stages)} if context.plan.stages > 1 else {}
        over = call("tl.range", literal(0), context.sizes.text(k.size), self.tile.block(k), **stages)
        zeros = call("tl.zeros", self.tile.shape(self.tile.dims), literal("tl.float32"))
        top.body += [Let(self.accumulator, zeros), For("k_at", over, turn.body)]

    def _precision(self) -> dict[str, Expr | str]:
        """The precision of float32 operands; what torch's setting allows is looked up at each launch."""
        if self.roles.dtype != "f32":
            return {}
        self.context.sizes.constants[PRECISION] = EXACTLY
        return {"input_precision": name(PRECISION)}


def name_product_axes(roles: Roles, _plan: Schedule, names: Names) -> Mapping[Axis, str]:
    """Row, col and k over M, N and K; the others are scalars."""
    spare = iter("BCDEFGHIJLOPQRSTUVWXYZ")
    letters = {roles.row: "M", roles.col: "N", roles.k: "K"}
    words = {roles.row: "row", roles.col: "col", roles.k: "k"}
    for axis in (roles.row, roles.col, roles.k, *roles.batch):
        letter = letters.setdefault(axis, "") or next(spare)
        letters[axis], axis.name = letter, words.get(axis, letter.lower())
        names.fresh(letter)
        if axis is not roles.k:  # k is reserved
            names.fresh(axis.name)
    return letters


def traffic_of_product(emitter: Emitter, roles: Roles, tile: Tile) -> Traffic:
    """Operands are read once from memory; each further block of the other side reads them again, from L2."""
    traffic = emitter.traffic()
    for operand, opposite, side in ((roles.left, roles.col, tile.cols), (roles.right, roles.row, tile.rows)):
        for load in (t for t in terms_below([operand]) if t.op == "load" and roles.k in t.axes):
            once = tidy(product(a.size for a in load.axes) * ITEMSIZE[load.dtype])
            if (again := tidy(once * (cdiv(opposite.size, side) - 1))) != 0:
                add_bytes(traffic.cached, emitter.buffers.labels[load.param.ref], again)
    return traffic


def kernel_of_product(program: Program, roles: Roles, target: Target, hints: Hints, label: str) -> Kernel:
    """One kernel around one product."""
    tile = tile_of(roles, target, hints)
    plan = schedule_of(roles, tile, target, hints)
    sides = {roles.row: tile.rows, roles.col: tile.cols, roles.k: tile.depth}
    emitter = Emitter(program, plan, target, hints, label, partial(name_product_axes, roles), sides)
    ProductLoop(emitter, roles, tile).emit()
    return assemble(emitter, traffic_of_product(emitter, roles, tile))


def kernels_of(graph: Graph, target: Target, hints: Hints, label: str) -> Kernels:
    """The kernel of a graph with one product, all around it elementwise; raises Unfusible where a tile cannot be it."""
    node = next(v for v in graph.order() if v.prim == "dot")
    terms = TermTable()
    outputs = zip(graph.outputs, graph.output_strides, strict=True)
    goals = [
        Goal(value, Memory(Ref("output", i), strides, value.dtype))
        for i, (value, strides) in enumerate(outputs)
        if value is not None and strides is not None
    ]
    try:
        program = Program(unify(terms, build_sinks(terms, {}, goals)))
    except Materialize:
        refuse(node, "a tile of it does not hold what is made of it")
    return Kernels((kernel_of_product(program, roles_of(program, node, hints), target, hints, label),))
