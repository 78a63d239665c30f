"""What a streamed kernel does, as facts for reports: its blocks, what it makes tiles of, what it skips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....ir.passes.streaming.pairs import EXPONENTIAL
from ....ir.text.source_names import source_name
from ....ir.types import Size, product
from ...kernel import Walk
from ...program.axes import Term
from ...program.sizes import Hints, evaluate_size, tidy
from ...schedule.separation.algebra import source_of
from ...schedule.streams.masks import Bound, Span
from ...schedule.streams.roles import Roles
from ...schedule.streams.tiles import StreamTile, pair_tiles, tile_products
from .stream import Stream
from .values import uses_of

EXTREMES = {"amax": "the maximum", "amin": "the minimum"}


def walk_of(stream: Stream, spans: Sequence[Span], tile: StreamTile) -> Walk:
    """The facts of one kernel, whose text is complete."""
    roles, sums = stream.roles, stream.sums
    axes = (*roles.grid, *roles.outer, roles.row, roles.stream)
    tiles = tile_products(sums)
    made = [*tiles, *pair_tiles(sums, roles)]
    running = {t for a in sums.accumulators if a.scale is not None for t in a.running}
    return Walk(
        roles.row.size, roles.stream.size, tidy(product(a.size for a in axes)),
        (tile.blocks[roles.row], tile.blocks[roles.stream]), ("M", "N"),
        tuple(a.size for a in roles.outer), roles.keeps_stream, sums.passes,
        tuple(dict.fromkeys(source_name(t.node) for t in made if t.node is not None)),
        tuple(dict.fromkeys(EXTREMES.get(t.op, f"the {t.op}") for t in sorted(running, key=lambda t: t.op))),
        tuple(dict.fromkeys(word for span in spans for word in _skips(span, stream, _rows_are_left(tiles, roles)))),
        sum(_alive(span, stream, tile) for span in spans) / len(spans), _prologue(stream),
        *_arithmetic(stream, tiles),
    )  # fmt: skip


def _prologue(stream: Stream) -> tuple[str, ...]:
    """What is stored before a pass begins."""
    return tuple(stream.emitter.buffers.stem(s.ref) for s in stream.sums.sinks if stream.is_of_rows(s))


# ------------------------------------------------------------------ how much it computes
def _arithmetic(stream: Stream, tiles: Sequence[Term]) -> tuple[Size, str, Size]:
    """Operations in products, their dtype, and exponentials."""
    sums = stream.sums
    products = dict.fromkeys((*tiles, *(a.term for a in sums.accumulators if a.kind == "product")))
    multiplied = sum((2 * product(a.size for a in t.args[0].axes) for t in products), 0)
    made = uses_of([*(a.body for a in sums.accumulators), *(t for s in sums.sinks for t in s.terms)], stream.labels)
    powers = sum((product(a.size for a in t.axes) for t in made if t.op in EXPONENTIAL), 0)
    dtypes = {source_of(arg).dtype for t in tiles for arg in t.args[0].args}
    return tidy(multiplied), dtypes.pop() if len(dtypes) == 1 else "f32", tidy(powers)


def _alive(span: Span, stream: Stream, tile: StreamTile) -> float:
    """The share of the matrix in blocks that are walked, of bounds that are no data."""
    roles, hints = stream.roles, stream.context.hints
    rows, length = (evaluate_size(a.size, hints) for a in (roles.row, roles.stream))
    if not span.is_bounded or not rows * length:
        return 1.0
    block, step = tile.blocks[roles.row], tile.blocks[roles.stream]
    firsts = range(0, rows, block)
    walked = (_walked(span, (first, min(first + block, rows) - 1), length, step, hints) for first in firsts)
    return sum(walked) / (len(firsts) * length)


def _walked(span: Span, rows: tuple[int, int], length: int, step: int, hints: Hints) -> int:
    """Places of the stream that a block of rows visits."""
    ends = [b.row * rows[b.row > 0] + evaluate_size(b.offset, hints) + 1 for b in span.highs if not b.numbers]
    starts = [-b.row * rows[b.row > 0] - evaluate_size(b.offset, hints) for b in span.lows if not b.numbers]
    start, end = max([0, *starts]) // step * step, min([length, *ends])
    return max(0, min(length, -(-(end - start) // step) * step))


# ------------------------------------------------------------------ what it leaves out


def remarks_on(walk: Walk) -> Iterator[str]:
    """Lines that say what the kernel does, without numbers."""
    way = "a program has a tile of BLOCK_M rows and BLOCK_N columns"
    if not walk.keeps_stream:
        way = "a program has BLOCK_M rows, and walks their columns by BLOCK_N"
    yield f"never in memory: {', '.join(walk.products)}; {way}" if walk.products else way
    moves = f"sums are relative to {' and '.join(walk.relative_to)} so far" if walk.relative_to else ""
    skips = f"blocks {' and '.join(walk.skips)} are skipped" if walk.skips else ""
    if walk.prologue:
        yield f"of its rows it makes {', '.join(walk.prologue)} first, which kernels behind it read"
    yield from filter(None, ["; ".join(filter(None, [moves, skips]))])


def _rows_are_left(tiles: Sequence[Term], roles: Roles) -> bool:
    """The kernel's rows are those of its matrices, which a product has from its left operand."""
    return not tiles or roles.row in tiles[0].args[0].args[0].axes


def _skips(span: Span, stream: Stream, rows_are_left: bool) -> Iterator[str]:
    """Which blocks are not walked: those of one side of a diagonal, or of both, and those past what data says."""
    bounds = [*span.lows, *span.highs]
    slanted = [b for b in bounds if b.row and not b.numbers]
    if {b.by for b in slanted} == {1, -1}:
        yield "outside the window"
    elif slanted:
        yield "above the diagonal" if (slanted[0].by < 0) == rows_are_left else "below the diagonal"
    yield from (_end(b, stream) for b in bounds if b not in slanted)


def _end(bound: Bound, stream: Stream) -> str:
    """A bound that data gives, or a number."""
    side = "past" if bound.by <= 0 else "before"
    names = [stream.emitter.buffers.stem(t.param.ref) for _, t in bound.numbers if t.op == "load"]
    return f"{side} `{names[0]}`" if names else f"{side} a fixed place"
