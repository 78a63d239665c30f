"""Values that are never to be in memory: products larger than what they are made of, and what is made of these.

    s = q [n, d] @ k [m, d].T      [n, m] is larger than both: virtual
    p = exp(s - max)               virtual
    p @ v                          it sums over a virtual value, and is none

A kernel makes such values tile by tile, and keeps what they are summed to. It knows nothing of kernels: which values
could be left out of memory is asked here, whether they are is decided where steps are merged (`streams`).
"""

from __future__ import annotations

from ..graph import Graph, Value
from ..prims import PRIMS
from .cost import Hints, estimate

FOLLOWS = ("elementwise", "layout")
"""Families whose result is virtual where an operand is."""


def virtual_values(graph: Graph, hints: Hints) -> frozenset[int]:
    """Ids of the live values that are virtual at these sizes."""
    virtual: set[int] = set()
    for value in graph.order():
        inside = any(a.id in virtual for a in value.args)
        if PRIMS[value.prim].family in FOLLOWS:
            virtual |= {value.id} if inside else set()
        elif not inside and value.prim == "dot" and _outgrows(value, hints):
            virtual.add(value.id)
    return frozenset(virtual)


def _outgrows(dot: Value, hints: Hints) -> bool:
    """The product has more elements than either operand."""
    return estimate(dot.aval.numel, hints) > max(estimate(a.aval.numel, hints) for a in dot.args)
