"""A matrix product and what surrounds it, as one kernel: a tile of the result per program, a loop along what is summed.

    for k: acc = tl.dot(prologue of x[row, k], prologue of y[k, col], acc)     sums in float32
    epilogue(acc, bias[col], residual[row, col], ..) -> stores

To the axis program a product is sum(x * y, k) of node `dot`. Tiles that share operands run in groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import sympy

from ...ir import Graph, Value
from ...ir.errors import Unfusible
from ...ir.switches import is_on
from ...ir.types import ITEMSIZE, LOW_FLOATS, Size, product
from ..kernel import Kernels, Ref, Target
from ..program.axes import REDUCTIONS, SCANS, Axis, Goal, Materialize, Memory, Program, Term, below
from ..program.sinks import build_sinks
from ..program.sizes import Hints, blocks, number, power_of_two, tidy
from ..program.terms import TermTable
from ..program.unify import unify
from ..schedule.schedule import Schedule
from .emit import Emitter
from .loops import Accumulate, Expr, For, Let, Scope, Statement, binary, call, literal, name, total
from .mathematics import narrowed
from .values import Coord, name_of

GROUP = 8
"""Rows of tiles that run together: their operands are in L2."""
LEAST = 16
"""The shortest side that a tensor core takes."""
OPEN = (64, 64, 32)
"""The shortest rows, columns and depth of a tile along sizes that are no constants."""
PRECISION, EXACTLY = "PRECISION", "ieee"
"""The constant of kernels that multiply float32, and its value where torch's setting allows no TF32."""


class Tile(NamedTuple):
    """What one program computes: rows x cols of the result, `depth` of the sum per turn, by so many warps of 32."""

    rows: int
    cols: int
    depth: int
    warps: int


TILES = {
    2: (Tile(128, 128, 64, 8), Tile(128, 64, 64, 4), Tile(64, 64, 64, 4), Tile(64, 32, 64, 4), Tile(32, 32, 64, 2)),
    4: (Tile(64, 64, 32, 4), Tile(64, 32, 32, 4), Tile(32, 32, 32, 4)),
}
"""By bytes of an element, the largest first: the first that leaves no unit of the device without work."""


# ------------------------------------------------------------------ which axis is what
@dataclass(frozen=True)
class Roles:
    """left[row, k] x right[k, col], for every point of `rest`; `total` is their product."""

    total: Term
    left: Term
    right: Term
    row: Axis
    col: Axis
    k: Axis
    rest: tuple[Axis, ...]

    @property
    def dtype(self) -> str:
        """What is multiplied: low floats that were only widened lose nothing by being multiplied as what they were."""
        sources = {source_of(t).dtype for t in (self.left, self.right)}
        return sources.pop() if len(sources) == 1 else self.total.dtype


def source_of(term: Term) -> Term:
    """cast(x: bf16, f32)  ->  x"""
    widens = term.op == "cast" and term.dtype == "f32" and term.args[0].dtype in LOW_FLOATS
    return term.args[0] if widens else term


def roles_of(program: Program, node: Value, hints: Hints) -> Roles:
    """The roles of a program's axes around its one product; raises Unfusible where a tile cannot hold it."""
    total = next((t for t in program.terms if _is_product(t)), None)
    if total is None or total.args[0].op != "mul":
        _refuse(node, "nothing is left of it")
    others = [t for t in program.terms if t.op in (*REDUCTIONS, *SCANS) and t is not total]
    everywhere = all(set(s.axes) == total.axes and s.mode == "store" for s in program.sinks)
    if others or not everywhere:
        _refuse(node, "something beside it is not computed element by element")
    left, right = total.args[0].args
    if ITEMSIZE[total.dtype] not in TILES:
        _refuse(node, f"no tile holds {total.dtype}")
    close = {a for s in program.sinks[:1] for a, c in s.place.terms if c == 1}
    if close & (left.axes - right.axes):  # stores are along the columns
        left, right = right, left
    rows, cols = (sorted(a.axes - b.axes, key=lambda x: x.order) for a, b in ((left, right), (right, left)))
    if len(total.param) != 1 or not rows or not cols or not set(total.param) <= left.axes & right.axes:
        _refuse(node, "it is no product of matrices")
    row = max(rows, key=lambda a: number(a.size, hints))
    col = max(cols, key=lambda a: (a in close, number(a.size, hints)))
    rest = tuple(a for a in program.axes if a in total.axes and a not in (row, col))
    return Roles(total, left, right, row, col, total.param[0], rest)


def _is_product(term: Term) -> bool:
    return term.op == "sum" and term.node is not None and term.node.prim == "dot"


def _refuse(node: Value, why: str) -> NoReturn:
    raise Unfusible(node, f"a product is left to the library: {why}")


# ------------------------------------------------------------------ the schedule
def schedule_of(roles: Roles, tile: Tile, target: Target, hints: Hints) -> Schedule:
    """Roles as a schedule; its `tile` is that of the result."""
    return Schedule(
        row=(), chunked=False, walk=(), grid=(*roles.rest, roles.row, roles.col),
        tile={roles.row: tile.rows, roles.col: tile.cols}, inner=frozenset(), final=(), after=frozenset(),
        phase={}, items=None, programs=None, warps=max(min(tile.warps, 4), tile.warps * 32 // target.warp),
        stages=_stages(roles, tile, target, hints), order=(*roles.rest, roles.row, roles.k, roles.col),
        hoisted=True, online={}, direct={},
    )  # fmt: skip


def tile_of(roles: Roles, target: Target, hints: Hints) -> Tile:
    """The largest tile that leaves no unit without work, no side much longer than what it covers.

    A size that may be another one at the next call is not taken to be small: the tile serves that call, too.
    """
    axes = (roles.row, roles.col, roles.k)
    open_ = [not isinstance(a.size, int) and target.kind != "interpret" for a in axes]
    least = [o if may_grow else LEAST for o, may_grow in zip(OPEN, open_, strict=True)]
    sizes = [number(a.size, hints) for a in axes]
    batch = math.prod(max(1, number(a.size, hints)) for a in roles.rest)
    fitted = [_fit_tile(t, sizes, least) for t in TILES[ITEMSIZE[roles.dtype]]]
    fitted = [t for t in fitted if t.rows >= least[0] and t.cols >= least[1]]
    busy = (i for i, t in enumerate(fitted) if -(-sizes[0] // t.rows) * -(-sizes[1] // t.cols) * batch >= target.units)
    at = next(busy, len(fitted) - 1) - target.leaning.lanes
    found = fitted[min(max(at, 0), len(fitted) - 1)]
    return found._replace(warps=max(1, int(found.warps * 2.0**target.leaning.warps)))


def _fit_tile(tile: Tile, sizes: Sequence[int], least: Sequence[int]) -> Tile:
    pairs = zip(tile[:3], sizes, least, strict=True)
    rows, cols, depth = (min(side, max(low, power_of_two(n))) for side, n, low in pairs)
    while sizes[2] % depth and depth > least[2] and not sizes[2] % LEAST:  # whole turns need no masks
        depth //= 2
    return Tile(rows, cols, depth, tile.warps)


def _stages(roles: Roles, tile: Tile, target: Target, hints: Hints) -> int:
    """Turns whose loads are in flight, as far as shared memory holds them."""
    turns = -(-number(roles.k.size, hints) // tile.depth)
    turn = (tile.rows + tile.cols) * tile.depth * ITEMSIZE[roles.dtype]
    wanted = min((2 if target.kind == "hip" else 3) + target.leaning.stages, turns)
    return next((n for n in range(wanted, 1, -1) if n * turn <= target.shared * 3 // 4), 1)


# ------------------------------------------------------------------ the text
class Products(Emitter):
    """One kernel around one product."""

    def __init__(self, program: Program, roles: Roles, target: Target, hints: Hints, label: str) -> None:
        self.roles = roles
        tile = tile_of(roles, target, hints)
        self.sides = {roles.row: tile.rows, roles.col: tile.cols, roles.k: tile.depth}
        super().__init__(program, schedule_of(roles, tile, target, hints), target, hints, label)
        self.levels[roles.total] = 0
        self.one_turn = isinstance(roles.k.size, int) and roles.k.size <= tile.depth
        self.acc = self.names.fresh("acc")

    def build(self) -> list[Statement]:
        """Where the program is; the sum; what is made of it."""
        self._tile_coordinates()
        turn = Scope(0 if self.one_turn else 1, self.top)
        left, right = self._operands(turn)
        self._tile_is(self.roles.row, self.roles.col)
        self._emit_dot(left, right, turn)
        for sink in self.program.sinks:
            self.store(sink, self.top)
        return self.top.body

    # ------------------------------------------------------------------ names and lanes
    def _name_axes(self) -> None:
        """row, col and k over M, N and K; the others are scalars."""
        letters = iter("BCDEFGHIJLOPQRSTUVWXYZ")
        known = {self.roles.row: ("M", "row"), self.roles.col: ("N", "col"), self.roles.k: ("K", "k")}
        for axis in (self.roles.row, self.roles.col, self.roles.k, *self.roles.rest):
            letter = next(letters) if axis not in known else ""
            self.letter[axis], axis.name = known.get(axis, (letter, letter.lower()))
            self.names.fresh(self.letter[axis]), axis.name == "k" or self.names.fresh(axis.name)  # k is reserved
            if isinstance(axis.size, int):
                self.sizes.constants[self.letter[axis]] = axis.size
            else:
                self.sizes.scalars.setdefault(tidy(axis.size), self.letter[axis])

    def _tile_is(self, first: Axis, second: Axis) -> None:
        """What is emitted from here on varies along these two."""
        self.plan = replace(self.plan, tile={a: self.sides[a] for a in (first, second)})

    def block(self, axis: Axis) -> Expr:
        label = f"BLOCK_{self.letter[axis]}"
        self.sizes.constants[label] = self.sides[axis]
        return name(label)

    def lane(self, axis: Axis) -> Expr:
        """Tiles have two dimensions: an axis that is the first of two tiles has the same lanes in both."""
        first = next(iter(self.plan.tile)) is axis
        if (found := self.top.memo.get(("lane", axis, first))) is None:
            label = self.names.fresh(axis.name) if axis in self.laned else axis.name
            self.laned.add(axis)
            lanes, shape = call("tl.arange", literal(0), self.block(axis)), "[:, None]" if first else "[None, :]"
            self.top.body.append(Let(label, Expr(lanes.text + shape, names=lanes.names)))
            found = self.top.memo["lane", axis, first] = name(label)
        return found

    # ------------------------------------------------------------------ where a program is
    def _tile_coordinates(self) -> None:
        """The program's number as batch, row and column of tiles."""
        row, col = self.roles.row, self.roles.col
        several = [a for a in (row, col) if not self._is_one_block(a)]
        self.top.body.append(Let("pid", Expr("tl.program_id(0)", names=frozenset(["tl"]))))
        place = name("pid")
        if self.roles.rest:
            place = self._batch_coords(place, total("*", [self.count(a) for a in several]))
        places = self._grouped_place(place) if len(several) == 2 else (place,) * len(several)
        for axis, at in zip(several, places, strict=True):
            self._block_coord(axis, at, self.top, 0)

    def _batch_coords(self, place: Expr, tiles: Expr | None) -> Expr:
        """The coordinates of the batch; the tile within it."""
        flat, tile = place, place
        if tiles is not None:
            tiles = self._let(self.top, "tiles", tiles)
            tile, flat = self._let(self.top, "tile", binary("%", place, tiles)), binary("//", place, tiles)
        for position, axis in reversed(list(enumerate(self.roles.rest))):
            self._scalar_coord(axis, binary("%", flat, self.count(axis)) if position else flat, self.top, 0)
            flat = binary("//", flat, self.count(axis))
        return tile

    def _grouped_place(self, place: Expr) -> tuple[Expr, Expr]:
        """GROUP rows of tiles column by column, then the next rows: what they share is read again from L2."""
        top, rows, cols = self.top, self.count(self.roles.row), self.count(self.roles.col)
        group = name("GROUP")
        self.sizes.constants["GROUP"] = GROUP
        size = self._let(top, "in_group", binary("*", group, cols))
        above = self._let(top, "above", binary("*", binary("//", place, size), group))
        height = self._let(top, "height", call("tl.minimum", binary("-", rows, above), group))
        inside = self._let(top, "place", binary("%", place, size))
        return binary("+", above, binary("%", inside, height)), binary("//", inside, height)

    # ------------------------------------------------------------------ the sum
    def _operands(self, turn: Scope) -> tuple[Expr, Expr]:
        """The tiles that one turn multiplies."""
        roles, first = self.roles, None
        if not self.one_turn:
            first = self._let(turn, "first_k", call("tl.cast", name("k_at"), literal("tl.int64")))
        left = self._operand(roles.left, (roles.row, roles.k), first, turn)
        right = self._operand(roles.right, (roles.k, roles.col), first, turn)
        return left, right

    def _operand(self, term: Term, dims: tuple[Axis, Axis], first: Expr | None, turn: Scope) -> Expr:
        """An operand in the dtype that is multiplied, zero beyond the end of the sum."""
        k = self.roles.k
        self._tile_is(*dims)
        scope = Scope(turn.level, self.top, turn.body)
        lane = self.lane(k)
        self.coords[k] = Coord(first, lane, self._inside_k(lane, first, scope), turn.level)
        term = source_of(term) if self.roles.dtype in LOW_FLOATS else term
        value = self._read(term, scope) if term.op == "load" else self._prologue(term, scope)
        return self._let(scope, name_of(term) or ("x" if term.op == "load" else "operand"), value)

    def _inside_k(self, lane: Expr, first: Expr | None, scope: Scope) -> Expr | None:
        """The mask along the sum; none where whole turns cover it, or where guards see to that."""
        size, depth = self.roles.k.size, self.sides[self.roles.k]
        if number(size, self.hints) % depth == 0 and (isinstance(size, int) or is_on("multiples")):
            if not isinstance(size, int):
                self.sizes.guards[sympy.Eq(sympy.Mod(size, depth), 0)] = None
            return None
        left = self.sizes.text(size) if first is None else binary("-", self.sizes.text(size), first)
        return self._let(scope, "inside_k", binary("<", lane, left))

    def _prologue(self, term: Term, scope: Scope) -> Expr:
        """A prologue; lanes beyond the end add nothing, whatever it makes of the zeros that were read there."""
        k = self.roles.k
        value = self._computed(term, scope)
        mask = self.coords[k].mask
        if mask is not None and self.pad(term, k) != 0.0:
            value = call("tl.where", mask, value, literal("0.0"))
        return narrowed(value, self.roles.dtype) if self.roles.dtype in LOW_FLOATS else value

    def _emit_dot(self, left: Expr, right: Expr, turn: Scope) -> None:
        """acc = tl.dot(left, right, acc), in a loop unless one turn is all."""
        more, comment = self._precision(), self._comment(self.roles.total)
        if self.one_turn:
            self.top.body += [*turn.body, Let(self.acc, call("tl.dot", left, right, **more), comment)]
            return
        turn.body.append(Accumulate(self.acc, "=", call("tl.dot", left, right, name(self.acc), **more), comment))
        self.sizes.require_countable(self.roles.k.size)
        stages = {"num_stages": literal(self.plan.stages)} if self.plan.stages > 1 else {}
        over = call("tl.range", literal(0), self.sizes.text(self.roles.k.size), self.block(self.roles.k), **stages)
        zeros = call("tl.zeros", self.shape(self.plan.tile), literal("tl.float32"))
        self.top.body += [Let(self.acc, zeros), For("k_at", over, turn.body)]

    def _precision(self) -> dict[str, Expr | str]:
        """Of float32 operands; what torch's setting allows is looked up at each launch."""
        if self.roles.dtype != "f32":
            return {}
        self.sizes.constants[PRECISION] = EXACTLY
        return {"input_precision": name(PRECISION)}

    def _traffic(self) -> tuple[dict[str, Size], dict[str, Size], dict[str, Size]]:
        """Operands are read once from memory; each further block of the other side reads them again, from L2."""
        reads, writes, cached = super()._traffic()
        for operand, other in ((self.roles.left, self.roles.col), (self.roles.right, self.roles.row)):
            for load in (t for t in below([operand]) if t.op == "load" and self.roles.k in t.axes):
                once = tidy(product(a.size for a in load.axes) * ITEMSIZE[load.dtype])
                if (again := tidy(once * (blocks(other.size, self.sides[other]) - 1))) != 0:
                    self._add_traffic(cached, self.pointers[load.param.ref], again)
        return reads, writes, cached

    # ------------------------------------------------------------------ the result
    def _computed(self, term: Term, scope: Scope) -> Expr:
        return name(self.acc) if term is self.roles.total else super()._computed(term, scope)

    def _named(self, term: Term, text: Expr, home: Scope, scope: Scope) -> Expr:
        if term is not self.roles.total or text.text.isidentifier():
            return super()._named(term, text, home, scope)
        home.memo[term] = self._let(home, name_of(term) or "product", text)
        return home.memo[term]


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
        _refuse(node, "a tile of it does not hold what is made of it")
    emitter = Products(program, roles_of(program, node, hints), target, hints, label)
    return Kernels((emitter.kernel_of(),))
