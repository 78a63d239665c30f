"""Which axes of a program are the rows, columns and depth of its matrix product, and the tile that one program takes.

To the axis program a product is sum(x * y, k) of node `dot`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from ...ir import Value
from ...ir.errors import Unfusible
from ...ir.types import ITEMSIZE, LOW_FLOATS
from ..kernel import Target
from ..program.axes import REDUCTIONS, SCANS, Axis, Program, Term
from ..program.sizes import Hints, evaluate_size, power_of_two
from ..schedule.schedule import Schedule

LEAST = 16
"""The shortest side that a tensor core takes."""
OPEN = (64, 64, 32)
"""The shortest rows, columns and depth of a tile along sizes that are no constants."""


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
class Roles:
    """left[row, k] x right[k, col], for every point of `batch`; `total` is their product."""

    total: Term
    left: Term
    right: Term
    row: Axis
    col: Axis
    k: Axis
    batch: tuple[Axis, ...]

    @property
    def dtype(self) -> str:
        """The dtype of the operands: low floats that were only widened are multiplied as they were, exactly."""
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
        refuse(node, "nothing is left of it")
    further = [t for t in program.terms if t.op in (*REDUCTIONS, *SCANS) and t is not total]
    everywhere = all(set(s.axes) == total.axes and s.mode == "store" for s in program.sinks)
    if further or not everywhere:
        refuse(node, "something beside it is not computed element by element")
    left, right = total.args[0].args
    if ITEMSIZE[total.dtype] not in TILES:
        refuse(node, f"no tile holds {total.dtype}")
    close = {a for s in program.sinks[:1] for a, c in s.place.terms if c == 1}
    if close & (left.axes - right.axes):  # stores are along the columns
        left, right = right, left
    rows, cols = (sorted(a.axes - b.axes, key=lambda x: x.order) for a, b in ((left, right), (right, left)))
    if len(total.param) != 1 or not rows or not cols or not set(total.param) <= left.axes & right.axes:
        refuse(node, "it is no product of matrices")
    row = max(rows, key=lambda a: evaluate_size(a.size, hints))
    col = max(cols, key=lambda a: (a in close, evaluate_size(a.size, hints)))
    batch = tuple(a for a in program.axes if a in total.axes and a not in (row, col))
    return Roles(total, left, right, row, col, total.param[0], batch)


def _is_product(term: Term) -> bool:
    return term.op == "sum" and term.node is not None and term.node.prim == "dot"


def refuse(node: Value, why: str) -> NoReturn:
    raise Unfusible(node, f"a product is left to the library: {why}")


# ------------------------------------------------------------------ the schedule
def schedule_of(roles: Roles, tile: Tile, target: Target, hints: Hints) -> Schedule:
    """Roles as a schedule; its `tile` is that of the result."""
    return Schedule(
        row=(), chunked=False, walk=(), grid=(*roles.batch, roles.row, roles.col),
        tile={roles.row: tile.rows, roles.col: tile.cols}, inner=frozenset(), final=(), after_final=frozenset(),
        phase={}, items=None, programs=None, warps=max(min(tile.warps, 4), tile.warps * 32 // target.warp),
        stages=_stages(roles, tile, target, hints), order=(*roles.batch, roles.row, roles.k, roles.col),
        hoisted=True, online={}, direct={},
    )  # fmt: skip


def tile_of(roles: Roles, target: Target, hints: Hints) -> Tile:
    """The largest tile that leaves no unit without work, no side much longer than what it covers.

    A size that may be another one at the next call is not taken to be small: the tile serves that call, too.
    """
    axes = (roles.row, roles.col, roles.k)
    open_ = [not isinstance(a.size, int) and target.kind != "interpret" for a in axes]
    least = [o if may_grow else LEAST for o, may_grow in zip(OPEN, open_, strict=True)]
    sizes = [evaluate_size(a.size, hints) for a in axes]
    points = math.prod(max(1, evaluate_size(a.size, hints)) for a in roles.batch)
    fitted = [_fit_tile(t, sizes, least) for t in TILES[ITEMSIZE[roles.dtype]]]
    fitted = [t for t in fitted if t.rows >= least[0] and t.cols >= least[1]]
    busy = (i for i, t in enumerate(fitted) if -(-sizes[0] // t.rows) * -(-sizes[1] // t.cols) * points >= target.units)
    at = next(busy, len(fitted) - 1) - target.leaning.lanes
    tile = fitted[min(max(at, 0), len(fitted) - 1)]
    return tile._replace(warps=max(1, int(tile.warps * 2.0**target.leaning.warps)))


def _fit_tile(tile: Tile, sizes: Sequence[int], least: Sequence[int]) -> Tile:
    pairs = zip(tile[:3], sizes, least, strict=True)
    rows, cols, depth = (min(side, max(low, power_of_two(n))) for side, n, low in pairs)
    while sizes[2] % depth and depth > least[2] and not sizes[2] % LEAST:  # whole turns need no masks
        depth //= 2
    return Tile(rows, cols, depth, tile.warps)


def _stages(roles: Roles, tile: Tile, target: Target, hints: Hints) -> int:
    """Turns whose loads are in flight, as far as shared memory holds them."""
    turns = -(-evaluate_size(roles.k.size, hints) // tile.depth)
    turn = (tile.rows + tile.cols) * tile.depth * ITEMSIZE[roles.dtype]
    most = min((2 if target.kind == "hip" else 3) + target.leaning.stages, turns)
    return next((n for n in range(most, 1, -1) if n * turn <= target.shared * 3 // 4), 1)
