"""Blocks of rows and of the stream, warps and stages: the largest whose sums and tiles fit the registers.

The rule is held beside what the compiler makes of it: `tests/streams/test_registers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ....ir.errors import Unfusible
from ....ir.types import ITEMSIZE, Size, product
from ...kernel import Target
from ...program.axes import Axis, Term, terms_below
from ...program.sizes import Hints, cdiv, evaluate_size, power_of_two, tidy
from ..accelerator import descriptors_pay
from ..schedule import Schedule
from ..separation.algebra import is_tile_product, source_of
from .accumulators import Accumulation, operands_of
from .roles import Roles

LEAST = 16
"""The shortest side that a tensor core takes."""
ROOM = {16: 80, 8: 176, 0: 160}
"""Registers of a thread for sums and tiles, from so many warps on: of the 255 that there are, of 128 beside 15 other
warps. Addresses and masks take the rest."""
OLD, MASKED = 24, 32
"""Fewer where products read operands from registers, and where loops with masks are beside those without."""
ROOMY = 100
"""The architecture from which on the compiler may not spill for the sake of a second program on a multiprocessor where
loops with masks are beside those without: it is tempted by a few registers more than half of them (triton 3.7.1)."""
TEMPTING = 160
"""Nor where more hold sums and tiles, and some of these are read from memory: half of them are too few."""
CROWDED = 96
"""Fewer on gfx942 from eight warps of 64 lanes on, beside masks: two warps share 512, and four have them alone."""
BESIDE_DESCRIPTORS = 144
"""Registers for sums and tiles beside which the compiler has not spilled for the sake of descriptors: of 160 it has,
though mostly it takes fewer registers with them (triton 3.7.1)."""
SHARED = 0.75
"""Of the shared memory of a multiprocessor, for the tiles of one program."""
SIDE, EXACT_WARPS, EXACT_DEPTH = 8, 4, 64
"""Exact float32 without tensor cores: a thread reads both sides of its elements from end to end before it multiplies.
More elements, warps or depth are spilled, by kilobytes (triton 3.7.1)."""
DEEP = 256
"""Above it fewer rows would fit than a group of warps multiplies, and wait for L2: each block of them reads all."""

PAIRS = 2
"""Tiles beside what is made of it that a sum over pairs needs: the sum so far, and what it takes in."""
PAIRS_OF_THREAD = 16
"""Elements of such a tile that a thread has, at most: of more it spills what it takes in (triton 3.7.1)."""
OPEN = 64
"""The fewest rows of a tile along a size that is no constant."""


class Shape(NamedTuple):
    """rows x stream lanes, by so many warps of 32."""

    rows: int
    stream: int
    warps: int


SHAPES = (
    Shape(128, 64, 8), Shape(64, 64, 4), Shape(128, 32, 8), Shape(64, 32, 4), Shape(64, 32, 8), Shape(32, 32, 4),
    Shape(16, 32, 2), Shape(16, 16, 1),
)  # fmt: skip
"""The largest first."""
FEW = (Shape(LEAST, 64, 4), Shape(LEAST, 32, 4), Shape(LEAST, 32, 2), Shape(LEAST, 16, 1))
"""Of so few rows that the bytes of the stream are what is waited for: several warps read them."""


class StreamTile(NamedTuple):
    """The blocks of every axis with lanes, the warps, and the turns whose loads are in flight.

    roomy: so many programs of a multiprocessor have all its registers; 0: as the compiler decides.
    accelerated: tiles of the stream are read by descriptors of the tensor memory accelerator, where it takes them.
    """

    blocks: dict[Axis, int]
    warps: int
    stages: int
    roomy: int = 0
    accelerated: bool = False


def tile_of(roles: Roles, sums: Accumulation, target: Target, hints: Hints, masked: bool) -> StreamTile:
    """The first shape that registers and shared memory hold, and that leaves no unit of the device without work.

    Raises Unfusible where none is held. masked: some blocks of the stream have masks that others lack.
    """
    depths = {a: max(LEAST, power_of_two(evaluate_size(a.size, hints))) for a in roles.depth}
    if target.kind == "interpret":
        rows, stream = (_for_interpreter(evaluate_size(a.size, hints)) for a in (roles.row, roles.stream))
        blocks = {roles.row: rows, roles.stream: stream, **depths}
        return StreamTile(blocks, 4, 1, accelerated=descriptors_pay(0, 4, target))
    taken, pairs = _taken(target, masked or bool(roles.outer)), pair_tiles(sums, roles)
    shapes = FEW if isinstance(roles.row.size, int) and roles.row.size <= LEAST else SHAPES

    def fits(shape: Shape) -> bool:
        is_one = shape.rows <= shapes[0].rows and _suits(shape, sums, depths, target)
        is_thin = not pairs or shape.rows * shape.stream <= PAIRS_OF_THREAD * 32 * shape.warps
        return is_one and is_thin and _fits(shape, roles, sums, depths, target, taken)

    fitting = list(filter(fits, shapes))
    if not fitting:
        deepest = max((evaluate_size(a.size, hints) for a in roles.depth), default=0)
        raise Unfusible(sums.sinks[0].node, f"no tile of it fits into the registers, with rows of {deepest}")
    shape = _leaning(fitting, _chosen(fitting, roles, target, hints), target, fits)
    blocks = {roles.row: shape.rows, roles.stream: shape.stream, **depths}
    is_tempted = target.kind == "cuda" and int(target.arch) >= ROOMY
    roomy = int(is_tempted and _is_tempting(shape, roles, sums, depths, masked))
    stages = _stages(shape, roles, sums, depths, target)
    return StreamTile(blocks, shape.warps, stages, roomy, _is_accelerated(shape, roles, sums, depths, target))


def _chosen(fitting: Sequence[Shape], roles: Roles, target: Target, hints: Hints) -> Shape:
    """The largest that leaves no unit of the device without work; of few rows, whose stream is divided, of all."""
    # a size that may be another one at the next call is not taken to be small
    fitting = [s for s in fitting if isinstance(roles.row.size, int) or s.rows >= OPEN] or fitting
    busy = [s for s in fitting if _programs(s, roles, hints) >= target.units]
    return (busy or (fitting[:1] if fitting[0] in FEW else fitting[-1:]))[0]


def _is_accelerated(
    shape: Shape, roles: Roles, sums: Accumulation, depths: dict[Axis, int], target: Target
) -> bool:  # fmt: skip
    """Whether a turn's tiles are copied by descriptors; by itself never beside tiles that fill the registers."""
    is_full = _registers(shape, roles, sums, depths) > BESIDE_DESCRIPTORS
    moved = 0 if is_full else _bytes(shape._replace(rows=0), sums, roles, depths)
    return descriptors_pay(moved, shape.warps, target)


def schedule_of(roles: Roles, tile: StreamTile) -> Schedule:
    """Roles as a schedule; its `tile` is that of row and stream."""
    grid = (*roles.grid, *((roles.stream,) if roles.keeps_stream else ()), roles.row)
    blocks = roles.blocks.values()
    order = (
        *roles.grid, *roles.outer, *blocks, roles.row, roles.stream, *roles.depth, *roles.places, *roles.bins
    )  # fmt: skip
    return Schedule(
        row=(), chunked=False, walk=(), grid=grid, tile={a: tile.blocks[a] for a in (roles.row, roles.stream)},
        inner=frozenset(), final=(), after_final=frozenset(), phase={}, items=None, programs=None, warps=tile.warps,
        stages=tile.stages, order=order, hoisted=True, online={},
        direct={}, accelerated=tile.accelerated,
    )  # fmt: skip


def _for_interpreter(size: int) -> int:
    """Two blocks of an axis at least: it pays by program, and masks at the ends are seen."""
    return min(128, max(LEAST, power_of_two(size) // 2))


def _leaning(fitting: Sequence[Shape], shape: Shape, target: Target, fits: Callable[[Shape], bool]) -> Shape:
    """The shape that the target leans to from the chosen one, where that fits too."""
    lean = target.leaning
    at = min(max(fitting.index(shape) - lean.lanes, 0), len(fitting) - 1)
    sides = zip(fitting[at], (lean.rows, lean.walk, lean.warps), strict=True)
    leaned = Shape(*(int(n * 2.0**by) for n, by in sides))
    return leaned if min(leaned[:2]) >= LEAST and leaned.warps and fits(leaned) else fitting[at]


def _taken(target: Target, masked: bool) -> int:
    """Registers that are not there for sums and tiles."""
    if target.kind == "hip":
        return CROWDED if masked else 0
    if target.kind != "cuda" or target.arch == "90":
        return 0
    return (OLD if int(target.arch) < 90 else 0) + (MASKED if masked else 0)


def _suits(shape: Shape, sums: Accumulation, depths: dict[Axis, int], target: Target) -> bool:
    """Whether the target multiplies such tiles as fast as its products are taken to be."""
    if target.kind != "cuda":
        return True
    deepest = max(depths.values(), default=0)
    if _is_exact(sums):
        few = shape.warps <= EXACT_WARPS and shape.rows * shape.stream <= SIDE * 32 * shape.warps
        return few and deepest <= EXACT_DEPTH
    return deepest <= DEEP or int(target.arch) < 90 or shape.rows >= OPEN


def _is_exact(sums: Accumulation) -> bool:
    """Some product is of float32: no tensor core multiplies that exactly."""
    return any({source_of(a).dtype for a in t.args[0].args} == {"f32"} for t in tile_products(sums))


def _fits(
    shape: Shape, roles: Roles, sums: Accumulation, depths: dict[Axis, int], target: Target, taken: int
) -> bool:  # fmt: skip
    room = next(room for warps, room in ROOM.items() if shape.warps >= warps)
    room -= taken if target.kind == "cuda" or shape.warps >= 8 else 0
    needed = _registers(shape, roles, sums, depths) + _passing(shape, roles, sums, depths, target)
    return needed <= room and _bytes(shape, sums, roles, depths) <= _shared(target)


def _registers(shape: Shape, roles: Roles, sums: Accumulation, depths: dict[Axis, int]) -> int:
    """Of one thread: sums with columns, tiles of the products that are made again, and one that is made of them."""
    threads = shape.warps * 32
    columns = sum(_columns(a.term, depths) for a in sums.accumulators if a.kind == "product")
    if roles.keeps_stream:
        columns = shape.stream * sum(a.kind == "sum" for a in sums.accumulators)
    tiles = 1 + len(tile_products(sums)) + PAIRS * len(pair_tiles(sums, roles))
    return shape.rows * (columns + tiles * shape.stream) // threads


def _is_tempting(
    shape: Shape, roles: Roles, sums: Accumulation, depths: dict[Axis, int], masked: bool
) -> bool:  # fmt: skip
    """Whether the compiler would spill for a second program; with all registers, exact float32 takes twice as many."""
    read = _of_read_tiles(shape, roles, sums)
    is_full = read > 0 and read + _registers(shape, roles, sums, depths) > TEMPTING
    return (masked or is_full) and not _is_exact(sums)


def _of_read_tiles(shape: Shape, roles: Roles, sums: Accumulation) -> int:
    """Registers of a thread for tiles that are in memory: a bias for each row and column."""
    both = {roles.row, roles.stream}
    loads = {t for t in terms_below(t for s in sums.sinks for t in s.terms) if t.op == "load" and both <= t.axes}
    return len(loads) * shape.rows * shape.stream // (32 * shape.warps)


def _passing(shape: Shape, roles: Roles, sums: Accumulation, depths: dict[Axis, int], target: Target) -> int:
    """Registers through which a turn's tiles pass on their way to shared memory, where no copies are in flight."""
    if target.kind != "cuda" or int(target.arch) < 90 or _stages(shape, roles, sums, depths, target) > 1:
        return 0
    return _bytes(shape._replace(rows=0), sums, roles, depths) // (4 * 32 * shape.warps)


def _columns(term: Term, depths: dict[Axis, int]) -> int:
    return max((n for a, n in depths.items() if a in term.axes), default=0)


def tile_products(sums: Accumulation) -> list[Term]:
    """The products of matrices that are tiles: contracted along a depth."""
    terms = terms_below(t for s in sums.sinks for t in s.terms)
    found = {a.term for a in sums.accumulators}
    return [t for t in terms if is_tile_product(t) and t not in found]


def pair_tiles(sums: Accumulation, roles: Roles) -> list[Term]:
    """The tiles that are sums over pairs."""
    return [t for t in terms_below(t for s in sums.sinks for t in s.terms) if roles.is_of_pairs(t)]


def _bytes(shape: Shape, sums: Accumulation, roles: Roles, depths: dict[Axis, int]) -> int:
    """Of shared memory for one turn: the tiles that products read."""
    total = 0
    for load in {t for p in _operands(sums, roles) for t in terms_below([p]) if t.op == "load"}:
        side = shape.stream if roles.stream in load.axes else shape.rows
        total += side * max((n for a, n in depths.items() if a in load.axes), default=0) * ITEMSIZE[load.dtype]
    return total


def _operands(sums: Accumulation, roles: Roles) -> list[Term]:
    """What products multiply, tiles of the stream aside."""
    found = [a for t in tile_products(sums) for a in t.args[0].args]
    pairs = [operands_of(a.body, roles) for a in sums.accumulators if a.kind == "product"]
    return [*found, *(pair[1] for pair in pairs if pair is not None)]


def _shared(target: Target) -> int:
    return int(target.shared * SHARED)


def _stages(shape: Shape, roles: Roles, sums: Accumulation, depths: dict[Axis, int], target: Target) -> int:
    """Turns whose loads are in flight, as far as shared memory holds them."""
    turn = max(1, _bytes(shape._replace(rows=0), sums, roles, depths))
    still = _bytes(shape._replace(stream=0), sums, roles, depths)
    most = (1 if target.kind == "hip" else 2) + target.leaning.stages
    return next((n for n in range(most, 1, -1) if still + n * turn <= _shared(target)), 1)


def _programs(shape: Shape, roles: Roles, hints: Hints) -> int:
    return max(1, evaluate_size(programs_of(shape.rows, roles), hints))


def programs_of(rows: int, roles: Roles) -> Size:
    """How many programs there are, of so many rows each."""
    return tidy(product([cdiv(roles.row.size, rows), *(a.size for a in roles.grid)]))
