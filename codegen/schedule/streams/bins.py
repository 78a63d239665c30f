"""Sums of tiles by an index: a program sums what its tile has for each bin, and what programs have is added up behind.

    table[bin, h] = sum over b, i and j of where(index[i, j] == bin, x[b, h, i, j], 0)

    program (h, rows, columns):   tile = sum over b of x;   found[h, rows, columns, bin] = sum of tile where it is bin
    another kernel:               table[bin, h] = sum over rows and columns of found

No two programs add to one place, so the order of additions is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....ir.types import FLOATS
from ...kernel import Buffer
from ...program.axes import REDUCTIONS, Axis, Index, Sink, Term, terms_below
from ...program.sizes import cdiv, tidy
from ...program.terms import Temporary, TermTable
from ..separation.algebra import is_tile_product
from .accumulators import Accumulation
from .roles import Roles, virtual_products
from .tiles import StreamTile


@dataclass(frozen=True)
class Binned:
    """A sum by an index that a sink is made of: `whole` in the sink, `tile` in the place of it; `bins`: its axis."""

    sink: Sink
    whole: Term
    tile: Sink
    bins: Axis


def with_tiles(
    table: TermTable, sinks: Sequence[Sink], virtual: frozenset[int]
) -> tuple[list[Sink], list[Binned]]:  # fmt: skip
    """The sinks, tiles in the place of what is summed by an index; and these sums."""
    found = {s: binned for s in sinks if (binned := _binned(table, s, virtual)) is not None}
    return [found[s].tile if s in found else s for s in sinks], list(found.values())


def _binned(table: TermTable, sink: Sink, virtual: frozenset[int]) -> Binned | None:
    for term in terms_below(sink.terms):
        if term.op != "sum" or (parts := _parts(term, sink)) is None:
            continue
        index, bins, value = parts
        if virtual_products(terms_below([value]), virtual):
            return Binned(sink, term, _tile(table, sink, term, index, bins, value), bins)
    return None


def _parts(total: Term, sink: Sink) -> tuple[Term, Axis, Term] | None:
    """(index, bins, x) of a sum of where(index == bin, x, 0)."""
    (chosen,) = total.args
    if chosen.op != "where" or chosen.args[0].op != "eq" or chosen.dtype not in FLOATS:
        return None
    condition, value, nothing = chosen.args
    for number, index in (condition.args, condition.args[::-1]):
        bins = number.param.terms[0][0] if number.op == "index" and len(number.param.terms) == 1 else None
        is_bin = bins in sink.axes and bins not in index.axes | value.axes and number.param == Index.over(bins)
        if bins is not None and is_bin and nothing.op == "const" and nothing.param == 0:
            return index, bins, value
    return None


def _tile(table: TermTable, sink: Sink, total: Term, index: Term, bins: Axis, value: Term) -> Sink:
    """A store of what is summed at each place that the index tells from others; sums along the rest come first."""
    over = set(total.param)
    alike = tuple(sorted(over - index.axes, key=lambda a: a.order))
    summed = table.cast(value, "f32", value.node)
    if not alike and not _has_sum(summed):
        alike = (table.axes.axis(("the only term",), 1),)
        summed = table.make("spread", summed, dtype="f32", param=alike, node=value.node)
    if alike:
        summed = table.make("sum", summed, dtype="f32", param=alike, node=total.node)
    axes = tuple(sorted({*sink.axes, *over} - {bins, *alike}, key=lambda a: a.order))
    place = Index.linear([Index.over(a) for a in axes], [1] * len(axes))
    return replace(sink, value=summed, place=place, axes=axes, dtype="f32", by=index, within=())


def _has_sum(value: Term) -> bool:
    return any(t.op in REDUCTIONS and not is_tile_product(t) for t in terms_below([value]))


# ------------------------------------------------------------------ what a program finds
def with_found(
    table: TermTable, sums: Accumulation, roles: Roles, tile: StreamTile, binned: Sequence[Binned], first: int
) -> tuple[Accumulation, Roles, list[Sink], list[Buffer]]:  # fmt: skip
    """Stores of what programs find for each bin; and those of the tables, which read it. first: the next temporary."""
    blocks = {a: table.axes.axis((a, "block"), tidy(cdiv(a.size, tile.blocks[a]))) for a in (roles.row, roles.stream)}
    memory = {
        b.sink.ref: Temporary(first + at, "found", "f32", (*roles.grid, *blocks.values(), b.bins), b.sink.node)
        for at, b in enumerate(binned)
    }
    stores = [_store(s, memory[s.ref]) if s.by is not None else s for s in sums.sinks]
    tables = [_table(table, b, memory[b.sink.ref]) for b in binned]
    roles = replace(roles, bins=tuple(dict.fromkeys(b.bins for b in binned)), blocks=blocks)
    return replace(sums, sinks=tuple(stores)), roles, tables, [m.buffer for m in memory.values()]


def _store(sink: Sink, memory: Temporary) -> Sink:
    return replace(sink, ref=memory.ref, place=memory.place, axes=memory.axes)


def _table(table: TermTable, binned: Binned, memory: Temporary) -> Sink:
    """The sink, of a sum over what programs have found."""
    over = tuple(sorted(set(memory.axes) - set(binned.sink.axes), key=lambda a: a.order))
    total = table.make("sum", memory.load(table), dtype="f32", param=over, node=binned.whole.node)
    total = table.cast(total, binned.whole.dtype, binned.whole.node)
    return binned.sink.of_terms(table.replaced(binned.sink.terms, {binned.whole: total}))

