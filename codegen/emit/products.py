"""Matrix products and what surrounds them, as one kernel: a tile of the result per program, loops along the sums.

    for k: acc = tl.dot(prologue of x[row, k], prologue of y[k, col], acc)     sums in float32
           acc_2 = tl.dot(the same tile of x, prologue of z[k, col], acc_2)     products that share an operand
    for e: acc = tl.dot(prologue of u[row, e], prologue of v[e, col], acc)     what is added to another product
    epilogue(acc, acc_2, bias[col], residual[row, col], ..) -> stores

Tiles that share operands run in groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import sympy

from ...ir import Graph, Value
from ...ir.switches import is_on
from ...ir.types import ITEMSIZE, LOW_FLOATS, Size, product
from ..kernel import Kernel, Kernels, Ref, Target
from ..program.axes import Axis, Goal, Materialize, Memory, Program, Term, terms_below
from ..program.short_axes import written_out
from ..program.sinks import build_sinks
from ..program.sizes import Hints, cdiv, evaluate_size, tidy
from ..program.terms import TermTable
from ..program.unify import unify
from ..schedule.schedule import Schedule
from ..schedule.separation.algebra import source_of
from .access.coordinates import Coord
from .access.descriptors import Descriptors
from .access.traffic import Traffic, add_bytes
from .context import name_of
from .emit import Emitter, assemble, has_all_registers, with_enough_registers
from .mathematics import narrow
from .names import Names
from .product_schedule import (
    Product,
    Roles,
    Tile,
    depths_of,
    held_by_sums,
    is_product,
    loops_of,
    refuse,
    roles_of,
    schedule_of,
    tile_of,
)
from .reductions.selection import Selection, lanes_of
from .statements import Accumulate, Expr, For, Let, Scope, Statement, binary, call, literal, name, total

GROUP = 8
"""Rows of tiles that run together: their operands are in L2."""
TEMPTED = 64
"""Registers of a thread that hold sums, at most, where so few may be given to it that another program fits."""


class ProductTile:
    """One program: where its tile of the result is; the sums; and what is made of them."""

    def __init__(self, emitter: Emitter, roles: Roles) -> None:
        self.emitter, self.context, self.tile = emitter, emitter.context, emitter.tile
        self.roles = roles
        self.accumulators = accumulators_of(emitter, roles)

    def emit(self) -> None:
        """The epilogue reads the accumulators in the place of the products."""
        top = self.context.top
        self._set_coordinates()
        for products in loops_of(self.roles):
            loop = ProductLoop if products[0].chosen is None else SelectedLoop
            loop(self.emitter, self.roles, products, self.accumulators).emit()
        self.tile.dims = (self.roles.row, self.roles.col)
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


@dataclass(eq=False)
class Accumulator:
    """The sum of one product, or of several whose sums are added and rounded together."""

    label: str
    begun: bool = False


def accumulators_of(emitter: Emitter, roles: Roles) -> dict[Term, Accumulator]:
    """An accumulator for each product, several of which may have one; values read it in the place of their sum."""
    accumulators: dict[Term, Accumulator] = {}
    for term, totals in roles.sums.items():
        accumulator = Accumulator(emitter.context.names.fresh("acc"))
        accumulators |= dict.fromkeys(totals, accumulator)
        emitter.levels.fix(term, 0)
        emitter.values.accumulated[term] = name(accumulator.label)
    return accumulators


class ProductLoop:
    """The sums of products along the same axes, in one loop: what two of them read is loaded once."""

    def __init__(
        self, emitter: Emitter, roles: Roles, products: Sequence[Product], accumulators: Mapping[Term, Accumulator]
    ) -> None:
        self.emitter, self.context, self.tile = emitter, emitter.context, emitter.tile
        self.roles, self.products, self.accumulators = roles, products, accumulators
        self.k, self.groups = products[0].k, products[0].groups
        self.depth = self.tile.block_sizes[self.k]
        self.is_one_turn = not self.groups and isinstance(self.k.size, int) and self.k.size <= self.depth
        self.level = 0 if self.is_one_turn else 1
        described = self.context.plan.accelerated and not self.is_one_turn and not self.groups
        self.descriptors = Descriptors(emitter.addresses, self.k, self._first_in_32_bits) if described else None

    def emit(self) -> None:
        """Operands, then products; in a loop unless one turn is all."""
        # A turn that is the only one needs no loop
        turn = Scope(self.level, self.context.top)
        first = None if self.is_one_turn else self._begin_turn(turn)
        row, col, k = self.roles.row, self.roles.col, self.k
        lefts = self._operands([(p, p.left) for p in self.products], (row, k), first, turn)
        rights = self._operands([(p, p.right) for p in self.products], (k, col), first, turn)
        for product_, left, right in zip(self.products, lefts, rights, strict=True):
            self._emit_dot(product_, left, right, turn)
        self.context.top.body += turn.body if self.is_one_turn else [*self._zeros(), self._loop(turn)]

    # ------------------------------------------------------------------ turns
    def _begin_turn(self, turn: Scope) -> Expr | None:
        """The first element of a turn along k; None where each turn has all of it, of one group."""
        let, k_at = self.context.let, name("k_at")
        if not self.groups:
            return let(turn, "first_k", call("tl.cast", k_at, literal("tl.int64")))
        turns = -(-int(self.k.size) // self.depth)
        group = k_at if turns == 1 else binary("//", k_at, literal(turns))
        for position, axis in reversed(list(enumerate(self.groups))):
            number = binary("%", group, self.tile.count(axis)) if position else group
            self.emitter.coords.set_element(axis, number, turn, 1)
            group = binary("//", group, self.tile.count(axis))
        if turns == 1:
            return None
        block = binary("*", binary("%", k_at, literal(turns)), self.tile.block(self.k))
        return let(turn, "first_k", call("tl.cast", block, literal("tl.int64")))

    def _loop(self, turn: Scope) -> For:
        """for k_at in tl.range(0, K, BLOCK_K), or for the number of each turn where groups divide the sum."""
        sizes = self.context.sizes
        if not self.groups:
            sizes.require_countable(self.k.size)
            over = call("tl.range", literal(0), sizes.text(self.k.size), self.tile.block(self.k), **self._stages)
        else:
            turns = tidy(product(g.size for g in self.groups) * -(-int(self.k.size) // self.depth))
            sizes.require_countable(turns)
            over = call("tl.range", literal(0), sizes.text(turns, "turns"), **self._stages)
        return For("k_at", over, turn.body)

    @property
    def _stages(self) -> dict[str, Expr]:
        stages = self.context.plan.stages
        return {"num_stages": literal(stages)} if stages > 1 else {}

    # ------------------------------------------------------------------ operands
    def _operands(
        self, terms: Sequence[tuple[Product, Term]], dims: tuple[Axis, Axis], first: Expr | None, turn: Scope
    ) -> list[Expr]:
        """The tiles of the products' operands on one side; each once."""
        self.tile.dims = dims
        scope = Scope(turn.level, self.context.top, turn.body)
        lane = self.tile.lane(self.k)
        self.emitter.coords[self.k] = Coord(first, lane, self._inside_k(lane, first, scope), turn.level)
        tiles: dict[tuple[Term, str], Expr] = {}
        for product_, term in terms:
            key = term, product_.dtype
            tiles[key] = tiles[key] if key in tiles else self._operand(*key, scope)
        return [tiles[term, product_.dtype] for product_, term in terms]

    def _operand(self, term: Term, dtype: str, scope: Scope) -> Expr:
        """The tile of an operand in the dtype that is multiplied, zero beyond the end of the sum."""
        term = source_of(term) if dtype in LOW_FLOATS else term
        is_load = term.op == "load"
        value = self._tile(term, scope) if is_load else self._prologue(term, dtype, scope)
        return self.context.let(scope, name_of(term) or ("x" if is_load else "operand"), value)

    def _tile(self, term: Term, scope: Scope) -> Expr:
        """The tile of an operand that is in memory as it is multiplied."""
        tile = None if self.descriptors is None else self.descriptors.read(term)
        return self.emitter.values.read(term, scope) if tile is None else tile

    def _first_in_32_bits(self, axis: Axis) -> Expr:
        """The first element of the block at hand."""
        if axis is self.k:
            return name("k_at")
        base, top = self.emitter.coords[axis].base, self.context.top
        if base is None:
            return literal(0)
        if ("short", axis) not in top.memo:
            label = self.context.names.fresh(f"{axis.name}_at")
            top.memo["short", axis] = top.define(label, call("tl.cast", base, literal("tl.int32")))
        return top.memo["short", axis]

    def _inside_k(self, lane: Expr, first: Expr | None, scope: Scope) -> Expr | None:
        """The mask along the sum; none where whole turns cover it, or where guards see to that."""
        sizes, size = self.context.sizes, self.k.size
        if evaluate_size(size, self.context.hints) % self.depth == 0 and (isinstance(size, int) or is_on("multiples")):
            if not isinstance(size, int):
                sizes.guards[sympy.Eq(sympy.Mod(size, self.depth), 0)] = None
            return None
        left = sizes.text(size) if first is None else binary("-", sizes.text(size), first)
        return self.context.let(scope, "inside_k", binary("<", lane, left))

    def _prologue(self, term: Term, dtype: str, scope: Scope) -> Expr:
        """A prologue; lanes beyond the end add nothing, whatever it makes of the zeros that were read there."""
        value, mask = self.emitter.values.compute(term, scope), self.emitter.coords[self.k].mask
        if mask is not None and self.emitter.folding.pad(term, self.k) != 0.0:
            value = call("tl.where", mask, value, literal("0.0"))
        return narrow(value, dtype) if dtype in LOW_FLOATS else value

    # ------------------------------------------------------------------ sums
    def _emit_dot(self, product_: Product, left: Expr, right: Expr, turn: Scope) -> None:
        """acc = tl.dot(left, right, acc)"""
        accumulator, comment = self.accumulators[product_.total], self.context.comment(product_.total)
        precision = self.context.precision(product_.dtype)
        if self.is_one_turn and not accumulator.begun:
            accumulator.begun = True
            turn.body.append(Let(accumulator.label, call("tl.dot", left, right, **precision), comment))
            return
        dot = call("tl.dot", left, right, name(accumulator.label), **precision)
        turn.body.append(Accumulate(accumulator.label, "=", dot, comment))

    def _zeros(self) -> list[Statement]:
        """The accumulators that begin here."""
        self.tile.dims = (self.roles.row, self.roles.col)
        new = {a.label: a for p in self.products if not (a := self.accumulators[p.total]).begun}
        for accumulator in new.values():
            accumulator.begun = True
        shape = self.tile.shape(self.tile.dims)
        return [Let(label, call("tl.zeros", shape, literal("tl.float32"))) for label in new]



class SelectedLoop(ProductLoop):
    """The same over the points of a group at which a condition holds, and along k for each of them."""

    def emit(self) -> None:
        """The condition first, in lanes of its own."""
        emitter, (group,), chosen = self.emitter, self.groups, self.products[0].chosen
        assert chosen is not None
        self.level, self.parts = 2, self._parts()
        self.selection = Selection(self.context, self.tile, emitter.coords, emitter.values)
        self.selection.ask(group, chosen)
        # what was asked in lanes may be read of one point below
        emitter.levels.clear()
        for term in self.accumulators:
            emitter.levels.fix(term, 0)
        super().emit()

    def _begin_turn(self, turn: Scope) -> Expr | None:
        """The next point, and where the turn is along k."""
        if self.parts.text == "1":
            self.selection.take_turn(literal(0), turn)
            return None
        part = self.context.let(turn, "part", binary("%", name("k_at"), self.parts))
        self.selection.take_turn(part, turn)
        block = binary("*", part, self.tile.block(self.k))
        return self.context.let(turn, "first_k", call("tl.cast", block, literal("tl.int64")))

    def _loop(self, turn: Scope) -> For:
        return self.selection.loops(self.parts, "k_at", turn.body, **self._stages)

    def _parts(self) -> Expr:
        """The turns that each point takes."""
        if isinstance(self.k.size, int):
            return literal(-(-self.k.size // self.depth))
        (group,) = self.groups
        self.context.sizes.require_countable(tidy(self.k.size * lanes_of(group, self.context.hints)))
        blocks = call("tl.cdiv", self.context.sizes.text(self.k.size), self.tile.block(self.k))
        return self.context.let(self.context.top, "parts", blocks)


def name_product_axes(roles: Roles, _plan: Schedule, names: Names) -> Mapping[Axis, str]:
    """Row, col and k over M, N and K; further sums have lanes of other names, and the other axes are scalars."""
    spare = iter("BCDEFGHIJLOPQRSTUVWXYZ")
    k = roles.depths[0]
    letters = {roles.row: "M", roles.col: "N", k: "K"}
    words = {roles.row: "row", roles.col: "col", k: "k"}
    for axis in (roles.row, roles.col, *roles.depths, *roles.batch, *roles.groups):
        letter = letters.setdefault(axis, "") or next(spare)
        letters[axis], axis.name = letter, words.get(axis, letter.lower())
        names.fresh(letter)
        if axis is not k:  # k is reserved
            names.fresh(axis.name)
    return letters


def traffic_of_product(emitter: Emitter, roles: Roles, tile: Tile) -> Traffic:
    """Operands are read once from memory; each further block of the other side reads them again, from L2."""
    traffic = emitter.traffic()
    lefts, rights = (dict.fromkeys(getattr(p, side) for p in roles.products) for side in ("left", "right"))
    for operands, opposite, side in ((lefts, roles.col, tile.cols), (rights, roles.row, tile.rows)):
        for load in (t for t in terms_below(operands) if t.op == "load" and t.axes & {*roles.depths, *roles.groups}):
            once = tidy(product(a.size for a in load.axes) * ITEMSIZE[load.dtype])
            if (again := tidy(once * (cdiv(opposite.size, side) - 1))) != 0:
                add_bytes(traffic.cached, emitter.buffers.labels[load.param.ref], again)
    return traffic


def kernel_of_products(program: Program, node: Value, target: Target, hints: Hints, label: str) -> Kernel:
    """One kernel around its products."""
    roles = roles_of(program, node, target, hints)
    tile = tile_of(roles, node, target, hints)
    depths = depths_of(roles, tile, target, hints)
    plan = schedule_of(roles, tile, depths, target, hints)
    sides = {roles.row: tile.rows, roles.col: tile.cols, **depths}
    emitter = Emitter(program, plan, target, hints, label, partial(name_product_axes, roles), sides)
    ProductTile(emitter, roles).emit()
    kernel = assemble(emitter, traffic_of_product(emitter, roles, tile))
    # Else the compiler may spill, so that more programs fit on a multiprocessor than there are
    is_tempted = has_all_registers(kernel, emitter.context) and held_by_sums(roles, tile) <= TEMPTED
    kernel = with_enough_registers(kernel) if is_tempted else kernel
    never = _never_computed(roles)
    multiplied = tidy(kernel.multiplied - never) if kernel.multiplied != 0 else 0
    return replace(kernel, operations=tidy(kernel.operations - never), multiplied=multiplied)


def _never_computed(roles: Roles) -> Size:
    """The operations at points that are not selected: each is for one of the places that it may be at."""
    total: Size = 0
    for product_ in roles.products:
        walked = product_.total.args[0].axes
        places = product_.chosen.axes - set(product_.groups) if product_.chosen else frozenset[Axis]()
        total = total + 2 * (product(a.size for a in walked) - product(a.size for a in walked - places))
    return tidy(total)


def kernels_of(graph: Graph, target: Target, hints: Hints, label: str) -> Kernels:
    """The kernel of a graph with products, all around them elementwise; raises Unfusible where a tile cannot be it."""
    node = next(v for v in graph.order() if v.prim == "dot")
    terms = TermTable()
    outputs = zip(graph.outputs, graph.output_strides, strict=True)
    goals = [
        Goal(value, Memory(Ref("output", i), strides, value.dtype))
        for i, (value, strides) in enumerate(outputs)
        if value is not None and strides is not None
    ]
    try:
        sinks = unify(terms, build_sinks(terms, {}, goals))
    except Materialize:
        refuse(node, "a tile of it does not hold what is made of it")
    program = Program(written_out(terms, sinks, is_product))
    return Kernels((kernel_of_products(program, node, target, hints, label),))
