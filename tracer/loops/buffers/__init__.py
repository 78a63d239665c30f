"""Buffers that a loop fills, in the program of a short trace without its writes: what was written is what is read.

    out1 = select_scatter(out0, h0, 0, 0); out2 = select_scatter(out1, h1, 0, 1); ..   ->   out = stack([h0, h1, ..])
    select_backward(g1, (2, n), 0, 1) + select_backward(g0, (2, n), 0, 0) + ..         ->   stack([g0, g1, ..]) + 0

A loop that handed a whole buffer on from step to step would copy it each time. The second one is autograd's gradient of
x where a loop reads x[t]: zeros but for one place, and their sum.
"""

from __future__ import annotations

from dataclasses import replace

from ..program import Program
from .places import PLACED, SPREAD, put_places_together
from .rewriting import Rewriting
from .writes import WRITTEN, put_writes_together


def without_buffers(program: Program) -> Program:
    """The same program, its buffers put together once, at the end; what nothing reads is left out."""
    finish = (put_places_together, put_writes_together)
    return replace(Rewriting(program, {**WRITTEN, **PLACED}, finish).program(), had_writes=True)


def without_sums_of_places(program: Program) -> Program:
    """The same program, a gradient that is added up place by place put together once."""
    has_some = any(step.target in SPREAD for step in program.steps)
    return Rewriting(program, PLACED, (put_places_together,)).program() if has_some else program
