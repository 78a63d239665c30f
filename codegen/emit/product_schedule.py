"""Which axes of a program are the rows, columns and depths of its matrix products, and the tile that one program takes.

To the axis program a product is sum(x * y, k) of node `dot`. Several share rows, columns and batch; each has its own k,
which may be two axes: k inside groups of a scale that is one number for each of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from ...ir import Value
from ...ir.errors import Unfusible
from ...ir.types import ITEMSIZE, LOW_FLOATS
from ..kernel import Target
from ..program.axes import REDUCTIONS, SCANS, Axis, Program, Term, terms_below
from ..program.sizes import Hints, evaluate_size, power_of_two
from ..schedule.accelerator import descriptors_pay
from ..schedule.schedule import Schedule
from ..schedule.separation.algebra import source_of
from .values import count_uses

LEAST = 16
"""The shortest side that a tensor core takes."""
OPEN = (64, 64, 32)
"""The shortest rows, columns and depth of a tile along sizes that are no constants."""


MOST_HELD = 128
"""Registers of a thread, at most, that hold the sums of several products and several results that are made of them."""
MOST_WARPS = 8
WORD, PLAIN = 4, 2
"""Bytes of a register, and tiles that a product reads for its operands where each is one in memory."""


class Tile(NamedTuple):
    """The part of one program: rows x cols of the result, `depth` of the sum per turn, by so many warps of 32."""

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
class Product:
    """total = sum(left[row, k] * right[k, col]), turn by turn along k, for each point of `groups`.

    chosen: of the points of one group, those where it is true alone; both sides are zero elsewhere.
    """

    total: Term
    left: Term
    right: Term
    k: Axis
    groups: tuple[Axis, ...] = ()
    chosen: Term | None = None

    @property
    def dtype(self) -> str:
        """The dtype of the operands: low floats that were only widened are multiplied as they were, exactly."""
        sources = {source_of(t).dtype for t in (self.left, self.right)}
        return sources.pop() if len(sources) == 1 else self.total.dtype

    @property
    def over(self) -> tuple[Axis, ...]:
        """The axes of its loop."""
        return (*self.groups, self.k)


@dataclass(frozen=True)
class Roles:
    """The axes of all products, for every point of `batch`. `sums`: what accumulators hold, and which products each."""

    products: tuple[Product, ...]
    row: Axis
    col: Axis
    batch: tuple[Axis, ...]
    sums: Mapping[Term, tuple[Term, ...]]
    results: int
    beside: int = 1  # results that are stored into one tensor, each lane's next to each other

    @property
    def itemsize(self) -> int:
        """Bytes of the widest operand."""
        return max(ITEMSIZE[p.dtype] for p in self.products)

    @property
    def depths(self) -> tuple[Axis, ...]:
        """The axes of the sums that have lanes."""
        return tuple(dict.fromkeys(p.k for p in self.products))

    @property
    def groups(self) -> tuple[Axis, ...]:
        """The axes of the sums that have none."""
        return tuple(dict.fromkeys(g for p in self.products for g in p.groups))


def roles_of(program: Program, node: Value, target: Target, hints: Hints) -> Roles:
    """The roles of a program's axes around its products; raises Unfusible where one tile cannot hold them.

    Whether it can is no question of sizes: the kernel for others is of the same products.
    """
    totals = [t for t in program.terms if is_product(t)]
    if not totals or any(t.args[0].op != "mul" for t in totals):
        refuse(node, "nothing is left of it")
    _check_tile(program, totals, node)
    close = _close(program)
    rows, cols = _sides(totals, close, node)
    row = max(rows, key=lambda a: evaluate_size(a.size, hints))
    col = max(cols, key=lambda a: (a in close, evaluate_size(a.size, hints)))
    batch = tuple(a for a in program.axes if a in totals[0].axes and a not in (row, col))
    products = tuple(_product(t, row, _node_of(t, node)) for t in totals)
    beside = min(Counter(s.ref for s in program.sinks).values())
    return Roles(products, row, col, batch, _sums(program, totals, target), len(program.sinks), beside)


def _sides(totals: Sequence[Term], close: set[Axis], node: Value) -> tuple[list[Axis], list[Axis]]:
    """The axes that may be rows and those that may be columns of all products; stores are along the columns."""
    left, right = totals[0].args[0].args
    if close & (left.axes - right.axes):
        left, right = right, left
    rows, cols = left.axes - right.axes, right.axes - left.axes
    for total in totals:
        one, other = total.args[0].args
        if not (rows & one.axes - other.axes and cols & other.axes - one.axes):
            one, other = other, one
        rows, cols = rows & one.axes - other.axes, cols & other.axes - one.axes
        if not rows or not cols:
            refuse(_node_of(total, node), "it is no product of matrices")
    return sorted(rows, key=lambda a: a.order), sorted(cols, key=lambda a: a.order)


def _close(program: Program) -> set[Axis]:
    """The axis of neighbours in memory: that of the least step."""
    steps = [(c, a) for s in program.sinks[:1] for a, c in s.place.terms if isinstance(c, int) and c > 0]
    return {a for c, a in steps if c == min(step for step, _ in steps)}


def _sums(program: Program, totals: Sequence[Term], target: Target) -> dict[Term, tuple[Term, ...]]:
    """The products of each accumulator: those that are only added to each other, unrounded, have one together."""
    uses, unrounded = count_uses(program), ("f32", *(LOW_FLOATS if target.fast else ()))
    sums: dict[Term, tuple[Term, ...]] = {t: (t,) for t in totals}
    for term in program.terms:
        is_sum = term.op == "add" and term.dtype in unrounded and all(a in sums and uses[a] == 1 for a in term.args)
        if is_sum:
            sums[term] = tuple(t for a in term.args for t in sums.pop(a))
    return sums


def _check_tile(program: Program, totals: Sequence[Term], node: Value) -> None:
    """All else is computed element by element on the tile of the products, none of which reads another."""
    further = [t for t in program.terms if t.op in (*REDUCTIONS, *SCANS) and t not in totals]
    everywhere = all(set(s.axes) == t.axes and s.mode == "store" for s in program.sinks for t in totals)
    if further or not everywhere:
        refuse(node, "something beside it is not computed element by element")
    for total in totals:
        if any(is_product(t) for t in terms_below(total.args)):
            refuse(_node_of(total, node), "it reads another product")
        if ITEMSIZE[total.dtype] not in TILES:
            refuse(_node_of(total, node), f"no tile holds {total.dtype}")


def _node_of(total: Term, otherwise: Value) -> Value:
    return total.node or otherwise


def _product(total: Term, row: Axis, node: Value) -> Product:
    """The roles of one of the products on a tile of rows and columns."""
    left, right = sorted(total.args[0].args, key=lambda t: row not in t.axes)
    if not set(total.param) <= left.axes & right.axes:
        refuse(node, "it is no product of matrices")
    if (chosen := _chosen(left, right, total.param)) is not None:
        (group,), (k,) = chosen.axes & set(total.param), set(total.param) - chosen.axes
        return Product(total, left.args[1], right.args[1], k, (group,), chosen)
    *groups, k = sorted(total.param, key=lambda a: _distance(a, total), reverse=True)
    if groups and not isinstance(k.size, int):
        refuse(node, "it sums along groups of any length")
    return Product(total, left, right, k, tuple(groups))


def _chosen(left: Term, right: Term, over: Sequence[Axis]) -> Term | None:
    """The condition on one of the two axes of a sum outside of which both sides are zero."""
    if not all(t.op == "where" and t.args[2].op == "const" and t.args[2].param == 0 for t in (left, right)):
        return None
    chosen = left.args[0]
    is_of_one = len(chosen.axes & set(over)) == 1 and len(over) == 2
    return chosen if chosen is right.args[0] and is_of_one else None


def _distance(axis: Axis, total: Term) -> tuple[float, int]:
    """The least distance in memory between neighbours along one of several axes of a sum, where all are walked."""
    loads = [t for t in terms_below(total.args) if t.op == "load" and set(total.param) <= t.axes]
    steps = [c for t in loads for a, c in t.param.place.terms if a is axis]
    return min((abs(c) for c in steps if isinstance(c, int)), default=math.inf), -axis.order


def is_product(term: Term) -> bool:
    """True of the sum that a product of matrices is."""
    return term.op == "sum" and term.node is not None and term.node.prim == "dot"


def refuse(node: Value, why: str) -> NoReturn:
    raise Unfusible(node, f"a product is left to the library: {why}")


# ------------------------------------------------------------------ the schedule
def schedule_of(roles: Roles, tile: Tile, depths: Mapping[Axis, int], target: Target, hints: Hints) -> Schedule:
    """Roles as a schedule; its `tile` is that of the result."""
    return Schedule(
        row=(), chunked=False, walk=(), grid=(*roles.batch, roles.row, roles.col),
        tile={roles.row: tile.rows, roles.col: tile.cols}, inner=frozenset(), final=(), after_final=frozenset(),
        phase={}, items=None, programs=None, warps=max(min(tile.warps, 4), tile.warps * 32 // target.warp),
        stages=_stages(roles, tile, depths, target, hints),
        order=(*roles.batch, roles.row, *roles.groups, *roles.depths, roles.col),
        hoisted=True, online={}, direct={}, accelerated=_is_accelerated(roles, tile, depths, target),
    )  # fmt: skip


def loops_of(roles: Roles) -> list[tuple[Product, ...]]:
    """The products by loops: those along the same axes that read the same memory in each turn have one."""
    loops: list[list[Product]] = []
    for product in roles.products:
        along = [x for x in loops if x[0].over == product.over and x[0].chosen is product.chosen]
        alike = (x for x in along if any(_tiles_read(p) & _tiles_read(product) for p in x))
        if (loop := next(alike, None)) is not None:
            loop.append(product)
        else:
            loops.append([product])
    return [tuple(loop) for loop in loops]


def _tiles_read(product: Product) -> set[Term]:
    return {t for t in terms_below((product.left, product.right)) if t.op == "load" and product.k in t.axes}


def tile_of(roles: Roles, node: Value, target: Target, hints: Hints) -> Tile:
    """The largest tile that leaves no unit without work, no side much longer than what it covers.

    A size that may be another one at the next call is not taken to be small: the tile serves that call, too. The sums
    of several products are in registers at once. Of results that are stored next to each other a tile has fewer columns
    each.
    """
    axes = (roles.row, roles.col, *roles.depths[:1])
    least = _shortest_sides(axes, target)
    sizes = [evaluate_size(a.size, hints) for a in axes]
    points = math.prod(max(1, evaluate_size(a.size, hints)) for a in roles.batch)
    roomy = _roomy(TILES[roles.itemsize], roles, OPEN[1])
    if not roomy and roles.beside > 1:
        least[1] = max(LEAST, least[1] // roles.beside)
        narrow = [t._replace(cols=max(LEAST, t.cols // roles.beside)) for t in TILES[roles.itemsize]]
        roomy = _roomy(narrow, roles, least[1])
    if not roomy:
        refuse(node, "no tile holds the sums of so many")
    fitted = [_fit_tile(t, sizes, least) for t in roomy]
    fitted = [t for t in fitted if t.rows >= least[0] and t.cols >= least[1]]
    busy = (i for i, t in enumerate(fitted) if -(-sizes[0] // t.rows) * -(-sizes[1] // t.cols) * points >= target.units)
    at = next(busy, len(fitted) - 1) - target.leaning.lanes
    tile = fitted[min(max(at, 0), len(fitted) - 1)]
    return tile._replace(warps=max(1, int(tile.warps * 2.0**target.leaning.warps)))


def depths_of(roles: Roles, tile: Tile, target: Target, hints: Hints) -> dict[Axis, int]:
    """The lanes along each sum: those of the tile along the first."""
    first, *others = roles.depths
    deepest = TILES[roles.itemsize][0].depth
    least = {a: _shortest_sides((a, a, a), target)[2] for a in others}
    return {first: tile.depth} | {a: _fit_depth(deepest, evaluate_size(a.size, hints), least[a]) for a in others}


def _shortest_sides(axes: Sequence[Axis], target: Target) -> list[int]:
    """The shortest rows, columns and depth along these axes."""
    open_ = [not isinstance(a.size, int) and target.kind != "interpret" for a in axes]
    return [o if may_grow else LEAST for o, may_grow in zip(OPEN, open_, strict=True)]


def _roomy(tiles: Sequence[Tile], roles: Roles, columns: int) -> list[Tile]:
    """Those that hold all sums; none where not one of them is large enough for sizes that are no constants."""
    roomy = [t for tile in tiles if (t := _with_room(tile, roles)) is not None]
    return roomy if any(t.rows >= OPEN[0] and t.cols >= columns for t in roomy) else []


def _with_room(tile: Tile, roles: Roles) -> Tile | None:
    """The tile with as many warps as hold the sums of several products; None where not even the most do."""
    if len(roles.sums) == 1:
        return tile._replace(warps=min(MOST_WARPS, 2 * tile.warps)) if _are_chosen(roles) else tile
    held = (len(roles.sums) + roles.results - 1) * tile.rows * tile.cols
    counts = (w for w in (tile.warps, 2 * tile.warps) if w <= MOST_WARPS and held <= MOST_HELD * w * 32)
    return next((tile._replace(warps=w) for w in counts), None)


def held_by_sums(roles: Roles, tile: Tile) -> int:
    """Registers of a thread that hold the sums."""
    return len(roles.sums) * tile.rows * tile.cols // (32 * tile.warps)


def _are_chosen(roles: Roles) -> bool:
    """Operands of 32 bits are made of several tiles each, which pass through registers: pieces of concatenations."""
    return roles.itemsize == WORD and any(len(_tiles_read(p)) > PLAIN for p in roles.products)


def _fit_tile(tile: Tile, sizes: Sequence[int], least: Sequence[int]) -> Tile:
    pairs = zip(tile[:2], sizes, least, strict=False)
    rows, cols = (min(side, max(low, power_of_two(n))) for side, n, low in pairs)
    return Tile(rows, cols, _fit_depth(tile.depth, sizes[2], least[2]), tile.warps)


def _fit_depth(depth: int, size: int, least: int) -> int:
    depth = min(depth, max(least, power_of_two(size)))
    while size % depth and depth > least and not size % LEAST:  # whole turns need no masks
        depth //= 2
    return depth


def _stages(roles: Roles, tile: Tile, depths: Mapping[Axis, int], target: Target, hints: Hints) -> int:
    """Turns whose loads are in flight, as far as shared memory holds those of every loop that has several."""
    loops = [(loop, _turns(loop[0], depths, hints)) for loop in loops_of(roles)]
    most = (2 if target.kind == "hip" else 3) + target.leaning.stages
    stages = [_stages_of(loop, tile, depths[loop[0].k], min(most, n), target) for loop, n in loops if n > 1]
    return min(stages, default=1)


def _turns(product: Product, depths: Mapping[Axis, int], hints: Hints) -> int:
    """The turns of a product's loop at the hints."""
    blocks = -(-evaluate_size(product.k.size, hints) // depths[product.k])
    return blocks * math.prod(evaluate_size(g.size, hints) for g in product.groups)


def _stages_of(loop: Sequence[Product], tile: Tile, depth: int, most: int, target: Target) -> int:
    turn = _moved(loop, tile, depth)
    return next((n for n in range(most, 1, -1) if n * turn <= target.shared * 3 // 4), 1)


def _moved(loop: Sequence[Product], tile: Tile, depth: int) -> int:
    """Bytes of the operands of a turn."""
    sides = [(len({p.left for p in loop}), tile.rows), (len({p.right for p in loop}), tile.cols)]
    return sum(count * side for count, side in sides) * depth * max(ITEMSIZE[p.dtype] for p in loop)


def _is_accelerated(roles: Roles, tile: Tile, depths: Mapping[Axis, int], target: Target) -> bool:
    """Whether operands that are in memory as they are multiplied are read by descriptors."""
    return any(descriptors_pay(_moved(x, tile, depths[x[0].k]), tile.warps, target) for x in loops_of(roles))
