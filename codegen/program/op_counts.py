"""The operations of a kernel: one for each element of an elementwise result, of what is summed, of a scan.

A product of matrices is a sum of products here, too: two for each pair. Conversions, places and guards count nothing.
"""

from __future__ import annotations

from ...ir.prims import PRIMS
from ...ir.types import LOW_FLOATS, Size, product
from .axes import REDUCTIONS, SCANS, Program, Term
from .sizes import tidy


def operations_of(program: Program) -> Size:
    """An expression over the sizes; each value once, however often the kernel passes over it."""
    total: Size = 0
    for term in program.counted:
        total = tidy(total + _operations(term))
    return total


def multiplied_in(program: Program) -> Size:
    """The operations of products of low floats, which tensor cores do where the kernel leaves them to these."""
    products = (t for t in program.counted if t.op == "sum" and t.node is not None and t.node.prim == "dot")
    sizes = [2 * product(a.size for a in t.args[0].axes) for t in products if _is_of_low_floats(t.args[0])]
    return tidy(sum(sizes, 0))


def _is_of_low_floats(pairs: Term) -> bool:
    """True of pairs of low floats, of which both may have been widened."""
    return pairs.op == "mul" and all(_unwidened(a).dtype in LOW_FLOATS for a in pairs.args)


def _unwidened(term: Term) -> Term:
    while term.op == "cast" and term.dtype == "f32":
        term = term.args[0]
    return term


def _operations(term: Term) -> Size:
    if term.op in (*REDUCTIONS, *SCANS):
        return product(a.size for a in term.args[0].axes)
    counts = term.node is not None and term.op != "cast" and term.op in PRIMS
    return product(a.size for a in term.axes) if counts and PRIMS[term.op].family == "elementwise" else 0
