"""Turns of a loop that lack a few operations of the others, completed, so that they are turns like these.

    g = c @ y[n - 1];      a[n - 1] = g * h[n - 2];  d = g * w     the first:  g = -0.0 + c @ y[n - 1]
    g = d + c @ y[t];      a[t] = g * h[t - 1];      d = g * w
    g = d + c @ y[0];      a[0] = g * h0                           the last:   a[0] = g * p[0];  d = g * w

So autograd's backward of a loop begins and ends: where no gradient comes from a later step none is added, and what no
earlier step waits for is not made. x + -0.0 is x, bit by bit; what is made for nothing is read by nothing. What a step
of the other loop was given by the one before, p[t] = h[t - 1], is kept as it was given: by the first, h0.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..alignment import repetitions
from ..program import Program
from .completion import Run, run_of
from .given import keep_what_was_given
from .nodes import Node, linked, linked_leaf, unlinked

TURNS, SMALLEST = 3, 6
"""Turns that have to be alike, and operations that they have together."""


def completed(program: Program) -> Program:
    """The same program, with turns completed where they are nearly whole."""
    regions = repetitions([s.token for s in program.steps], SMALLEST, TURNS)
    nodes = linked(program.steps)
    results = [linked_leaf(leaf, nodes) for leaf in program.results]
    runs: list[Run] = []
    for region in regions:
        # the run before may have taken some of these steps to complete its last turn
        stop = runs[-1].turns.stop if runs else 0
        run = run_of(nodes, region.behind(stop), program)
        if run is not None:
            run.complete(stop)
            runs.append(run)
    keep_what_was_given([run.turns for run in runs])
    if not any(run.turns.is_changed for run in runs):
        return program
    order = _in_order(nodes, runs)
    for run in runs:
        run.rename_readers(order)
    return unlinked(program, order, results)


def _in_order(nodes: Sequence[Node], runs: Sequence[Run]) -> list[Node]:
    order, at = list[Node](), 0
    for run in runs:
        order += [*nodes[at : run.turns.start], *run.neutral, *run.turns.in_order()]
        at = run.turns.stop
    return [*order, *nodes[at:]]
