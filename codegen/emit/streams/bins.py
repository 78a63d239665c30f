"""A tile summed by an index: one turn for each bin between the first and the last that the tile has.

for bin_at in tl.range(first, last + 1):
    found = tl.where(bins == bin_at, tl.sum(tl.where(bin == bin_at, tile, 0.0)), found)

A tile far from where an index changes has one bin, and takes one turn.
"""

from __future__ import annotations

from ...program.axes import Axis, Sink
from ..access.coordinates import Coord
from ..statements import Accumulate, Expr, For, Store, binary, call, literal, name, total
from ..stores import names_of
from .stream import Stream

OUTSIDE = -1
"""The bin of lanes beyond the end of a tile."""


def store_bins(stream: Stream, sink: Sink) -> None:
    """What the program's tile has for each bin."""
    context, tile = stream.context, stream.emitter.tile
    (bins,) = (a for a in stream.roles.bins if a in sink.axes)
    value, place = _tile(stream, sink)
    let, top = context.let, context.top
    first, last = _ends(stream, place, stream.context.sizes.text(bins.size))
    with stream.shapes.of(bins):
        lane, block = tile.lane(bins), tile.block(bins)
        found = let(top, "found", call("tl.full", Expr(f"[{block.text}]", names=block.names), literal("0.0"),
                                       literal("tl.float32")))  # fmt: skip
        at = name(context.names.fresh("bin_at"))
        chosen = call("tl.where", binary("==", place, at), value, literal("0.0"))
        both = call("tl.sum", call("tl.sum", chosen, literal(1)), literal(0))
        turn = Accumulate(found.text, "=", call("tl.where", binary("==", lane, at), both, found))
        top.body.append(For(at.text, call("tl.range", first, binary("+", last, literal(1))), [turn]))
        _store(stream, sink, found)


def _tile(stream: Stream, sink: Sink) -> tuple[Expr, Expr]:
    """The tile, and the bin of each of its lanes."""
    context, shapes, top = stream.context, stream.shapes, stream.context.top
    dims = (stream.roles.row, stream.roles.stream)
    assert sink.by is not None
    with shapes.of(*dims):
        value = shapes.spread(stream.values.value(sink.value, top), shapes.dims(sink.value))
        index = shapes.spread(stream.values.value(sink.by, top), shapes.dims(sink.by))
        inside = total("&", [m for a in dims if (m := stream.emitter.coords[a].mask) is not None])
        index = call("tl.cast", index, literal("tl.int32"))
        if inside is not None:
            index = call("tl.where", inside, index, literal(OUTSIDE))
        shape = stream.emitter.tile.shape(dims)
        index = call("tl.broadcast_to", index, shape)
    return context.let(top, "tile", value), context.let(top, "bin_of", index)


def _ends(stream: Stream, place: Expr, count: Expr) -> tuple[Expr, Expr]:
    """The first and the last bin of the tile, both inside of the table."""
    let, top = stream.context.let, stream.context.top
    behind = call("tl.where", binary("<", place, literal(0)), count, place)
    first = call("tl.min", call("tl.min", behind, literal(1)), literal(0))
    last = call("tl.max", call("tl.max", place, literal(1)), literal(0))
    return let(top, "first_bin", _inside(first, count)), let(top, "last_bin", _inside(last, count))


def _inside(place: Expr, count: Expr) -> Expr:
    return call("tl.minimum", call("tl.maximum", place, literal(0)), binary("-", count, literal(1)))


def _store(stream: Stream, sink: Sink, found: Expr) -> None:
    """One number for each bin, at the program's own place."""
    emitter, top = stream.emitter, stream.context.top
    for axis, block in stream.roles.blocks.items():
        emitter.coords[block] = Coord(_number(stream, axis), None, None, 0)
    pointer = emitter.addresses.pointer(sink.ref, sink.place, [], top, sink.axes, None)
    masks = [m for a in stream.roles.bins if a in sink.axes and (m := emitter.coords[a].mask) is not None]
    top.body.append(Store(pointer, found, total("&", masks), names_of(masks), False, stream.context.comment(sink)))


def _number(stream: Stream, axis: Axis) -> Expr:
    """Which of the tiles along an axis the program has."""
    base = stream.emitter.coords[axis].base
    return literal(0) if base is None else binary("//", base, stream.emitter.tile.block(axis))
