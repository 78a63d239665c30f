"""The operations of a kernel: one for each element of an elementwise result, of what is summed, of a scan.

A product of matrices is a sum of products here, too: two for each pair. Conversions, places and guards count nothing.
"""

from __future__ import annotations

from ...ir.prims import PRIMS
from ...ir.types import Size, product
from .axes import REDUCTIONS, SCANS, Program, Term
from .sizes import tidy


def operations_of(program: Program) -> Size:
    """An expression over the sizes; each value once, however often the kernel passes over it."""
    total: Size = 0
    for term in program.counted:
        total = tidy(total + _operations(term))
    return total


def _operations(term: Term) -> Size:
    if term.op in (*REDUCTIONS, *SCANS):
        return product(a.size for a in term.args[0].axes)
    counts = term.node is not None and term.op != "cast" and term.op in PRIMS
    return product(a.size for a in term.axes) if counts and PRIMS[term.op].family == "elementwise" else 0
