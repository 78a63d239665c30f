"""Whether a graph is one kernel that holds all that it sums, instead of what it is divided into."""

from __future__ import annotations

from ..ir import Graph
from ..ir.loops.loop import scans_of
from ..ir.loops.unroll import unroll
from ..ir.passes.cost import minimal_bytes
from ..ir.passes.simplify import Simplify
from .kernel import Kernel, Kernels
from .program.sizes import Hints, evaluate_size
from .schedule.whole import BYTES

NEVER = frozenset({"dot", "scatter", "gather", "random"})
"""Not for what is multiplied, or goes to places that are data."""
SHORT = 2
"""Steps of a loop that may stand one behind the other instead."""
WORTH = 1.1
"""Bytes over the least possible, beyond which another form is looked for."""


def may_be_whole(graph: Graph, divided: Kernels, hints: Hints) -> bool:
    """It takes several launches or moves more than it has to, and all that is little."""
    if any(v.prim in NEVER for v in graph.order()) or not all(map(_is_short, scans_of(graph))):
        return False
    moved, least = moved_by(divided, hints), evaluate_size(minimal_bytes(graph), hints)
    return least > 0 and (len(divided.kernels) > 1 or moved > WORTH * least)


def _is_short(scan: object) -> bool:
    length = scan.params["length"]  # type: ignore[attr-defined]
    return isinstance(length, int) and length <= SHORT


def without_loops(graph: Graph) -> Graph:
    """The steps of short loops one behind the other."""
    return Simplify()(unroll(graph, {})) if scans_of(graph) else graph


def is_lighter(whole: Kernels, divided: Kernels, hints: Hints) -> bool:
    """Fewer launches, or as many and fewer bytes; and a program moves no more than fits into the time of a launch."""
    costs = [(len(k.kernels), moved_by(k, hints)) for k in (whole, divided)]
    programs = evaluate_size(whole.kernels[0].grid, hints)
    return costs[0] < costs[1] and costs[0][1] <= min(costs[1][1], BYTES * programs)


def moved_by(kernels: Kernels, hints: Hints) -> int:
    """Bytes read and written."""
    return sum(map(lambda k: _moved(k, hints), kernels.kernels))


def _moved(kernel: Kernel, hints: Hints) -> int:
    return sum(evaluate_size(n, hints) for by in (kernel.reads, kernel.writes) for n in by.values())
