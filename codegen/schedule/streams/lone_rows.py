"""A product of one row and many columns has no axis of rows; tiles have, so it is given one, of length one.

    s[b, m] = sum(q[b, d] * k[b, m, d])   ->   s[b, r, m] = sum(spread(q)[b, r, d] * k[b, m, d])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ...program.axes import Axis, Sink, Term, axes_mentioned, terms_below
from ...program.terms import TermTable
from ..separation.algebra import is_tile_product, source_of
from .roles import virtual_products


def with_lone_rows(table: TermTable, sinks: Sequence[Sink], virtual: frozenset[int]) -> list[Sink]:
    """The sinks, with an axis for the only row where what is summed has none."""
    return [_with_row(table, s, products) if (products := list(_of_one_row(s, virtual))) else s for s in sinks]


def _of_one_row(sink: Sink, virtual: frozenset[int]) -> Iterator[tuple[Term, int]]:
    """The products, each with the side of its row, whose columns the sink sums."""
    for product in filter(is_tile_product, virtual_products(terms_below(sink.terms), virtual)):
        left, right = (a.axes - set(product.param) for a in product.args[0].args)
        for side, (mine, other) in enumerate(((left, right), (right, left))):
            if product.param and mine < other and not (other - mine) & set(sink.axes):
                yield product, side


def _with_row(table: TermTable, sink: Sink, products: Iterable[tuple[Term, int]]) -> Sink:
    row, sides = table.axes.axis(("the only row",), 1), dict(products)
    new: dict[Term, Term] = {}
    for term in terms_below(sink.terms):
        args = tuple(new[a] for a in term.args)
        if term in sides:
            args = (_spread_operand(table, args[0], sides[term], row),)
        new[term] = table.make(term.op, *args, dtype=term.dtype, param=term.param, node=term.node)
    done = sink.of_terms(new)
    return replace(done, axes=(*done.axes, row)) if row in axes_mentioned(done.value) else done


def _spread_operand(table: TermTable, product: Term, side: int, row: Axis) -> Term:
    """The product with one operand the same along the row; what widens it stays on the outside."""
    operands = list(product.args)
    source = source_of(operands[side])
    spread = table.make("spread", source, dtype=source.dtype, param=(row,), node=source.node)
    operands[side] = table.cast(spread, operands[side].dtype, operands[side].node)
    return table.make("mul", *operands, dtype=product.dtype, node=product.node)
