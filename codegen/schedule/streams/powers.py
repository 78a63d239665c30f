"""exp(a - r), r the same along a row or a column of the tile:  exp2(fma(a, log2 e, -r log2 e)), two instructions.

Only where operands are low floats: the row is rounded at its own size. And not where a finite number may be so large
that a power of two of it is none, such as the least float that stands for -inf.

Where r is the maximum of a, subnormal powers count for nothing beside the 1 that is among them (`BESIDE_ONE`).
"""

from __future__ import annotations

from dataclasses import replace

from ....ir.types import FLOATS, LOW_FLOATS
from ...program.axes import Term, terms_below
from ..separation.algebra import LOG2E, Algebra, is_number, source_of, source_of_rounded
from .accumulators import Accumulation, is_moderate
from .roles import Roles

BESIDE_ONE = "beside one"
"""The parameter of such powers."""


def with_powers_of_two(algebra: Algebra, sums: Accumulation, roles: Roles) -> Accumulation:
    """The same sums; nothing is changed where operands are float32."""
    loads = [t for a in sums.accumulators for t in terms_below([a.body]) if t.op == "load" and t.dtype in FLOATS]
    if not any(t.dtype in LOW_FLOATS for t in loads):
        return sums
    known = {a.term for a in sums.accumulators}

    def rule(term: Term, args: tuple[Term, ...]) -> Term:
        if term in known:
            return term
        return _power(algebra, term, args, roles) or algebra.again(term, args)

    new = algebra.rewritten([a.body for a in sums.accumulators], rule)
    return replace(sums, accumulators=tuple(replace(a, body=new[a.body]) for a in sums.accumulators))


def _power(algebra: Algebra, term: Term, args: tuple[Term, ...], roles: Roles) -> Term | None:
    if term.op != "exp" or term.dtype == "f64":
        return None
    difference = source_of_rounded(args[0])
    if difference.op != "sub":
        return None
    tile, row = difference.args
    both = {roles.row, roles.stream}
    if not both <= tile.axes or both <= row.axes:
        return None
    mark = BESIDE_ONE if _is_top(row, tile) else None
    if term.dtype != "f32" or difference is not args[0] or not is_moderate(tile):
        return algebra.table.make("exp", *args, dtype=term.dtype, param=mark, node=term.node) if mark else None
    scale, tile = _scaled(tile)
    power = algebra.number(scale * LOG2E, tile)
    moved = algebra.make("mul", row, algebra.number(-LOG2E, row))
    return algebra.make("exp2", algebra.make("fma", tile, power, moved), param=mark)


def _is_top(row: Term, tile: Term) -> bool:
    """Whether a row is the maximum of a tile that this kernel walks, or one in memory, which backward is handed."""
    if row.op in ("cast", "spread", "where"):
        return _is_top(row.args[-1], tile)
    if row.op == "load" and row.node is not None:
        is_own = row.node.prim == "amax" and row.node.args[0] in (tile.node, source_of_rounded(tile).node)
        return is_own or row.node.params.get("is_top", False)
    return row.op == "amax" and source_of(row.args[0]) is source_of(tile)


def _scaled(term: Term) -> tuple[float, Term]:
    """x * 0.125 in float32  ->  (0.125, x)"""
    is_product = term.op == "mul" and term.dtype == "f32" and is_number(term.args[1]) and term.args[0].dtype == "f32"
    return (float(term.args[1].param), term.args[0]) if is_product else (1.0, term)
