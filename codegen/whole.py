"""Whether a graph is one kernel that holds all that it sums, instead of what it is divided into."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sympy

from ..ir import Graph
from ..ir.loops.loop import scans_of
from ..ir.loops.unroll import unroll
from ..ir.passes.cost import minimal_bytes
from ..ir.passes.simplify import Simplify
from .kernel import Kernel, Target
from .program.sizes import Hints, evaluate_size, symbols
from .schedule.loops.whole import BYTES

NEVER = frozenset({"dot", "scatter", "gather", "random"})
"""Not for what is multiplied, or goes to places that are data."""
SHORT = 2
"""Steps of a loop that may stand one behind the other instead."""
WORTH = 1.1
"""Bytes over the least possible, beyond which another form is looked for."""


def may_be_whole(graph: Graph, divided: Sequence[Kernel], target: Target, hints: Hints) -> bool:
    """It takes several launches or moves more than it has to, and all that is little."""
    if any(v.prim in NEVER for v in graph.order()):
        return False
    if any(evaluate_size(v.params["length"], hints) > SHORT for v in scans_of(graph)):
        return False
    moved, least = moved_by(divided, hints), evaluate_size(minimal_bytes(graph), hints)
    return is_little(divided, target, hints) and (len(divided) > 1 or moved > WORTH * least > 0)


def without_loops(graph: Graph, hints: Hints) -> tuple[Graph, dict[sympy.Symbol, int]]:
    """The steps of short loops one behind the other, and the sizes that say how many these are."""
    scans = scans_of(graph)
    pins = {s: int(hints[s]) for s in sorted(symbols(v.params["length"] for v in scans), key=str)}
    return (Simplify()(unroll(graph, pins)) if scans else graph), pins


def is_little(kernels: Sequence[Kernel], target: Target, hints: Hints) -> bool:
    """If each unit had a program, none of them would move more than fits into the time of a launch."""
    return moved_by(kernels, hints) <= BYTES * target.units


def is_lighter(whole: Sequence[Kernel], divided: Sequence[Kernel], hints: Hints) -> bool:
    """Fewer launches, or as many and fewer bytes; a program moves no more than fits into the time of those saved."""
    moved = [moved_by(k, hints) for k in (whole, divided)]
    saved = len(divided) - len(whole)
    programs = sum(evaluate_size(k.grid, hints) for k in whole)
    is_less = saved > 0 or (saved == 0 and moved[0] < moved[1])
    return is_less and 0 < moved[0] <= min(moved[1], BYTES * programs * max(1, saved))


def moved_by(kernels: Iterable[Kernel], hints: Hints) -> int:
    """Bytes read and written."""
    return sum(evaluate_size(n, hints) for k in kernels for by in (k.reads, k.writes) for n in by.values())
