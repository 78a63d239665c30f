"""The work of an unrolled loop grows with its steps, not faster: calls are counted, not seconds."""

from __future__ import annotations

import cProfile
import pstats
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from harness import Input, M, T, full, graph_of
from sympy.core.cache import clear_cache

from fusegrad.codegen import TARGETS, Kernels, generate
from fusegrad.codegen.proofs import prove
from fusegrad.ir import Graph, emit
from fusegrad.ir.passes.fuse import Fuse
from fusegrad.runtime.execution.graph_to_kernels import optimize

TARGET = TARGETS["cuda:90"]
SIZES = {M: 64}


def unrolled(steps: int) -> Graph:
    """A recurrence with another constant in each step, all steps stacked."""

    def results(a: T, x: T) -> T:
        h, rows = full(0.0, (M,), "f32"), []
        for t in range(steps):
            at, xt = (v[t : t + 1].reshape(M) for v in (a, x))
            h = (at * h * full(1.0 + t * 37 % 101, (M,), "f32") + xt).tanh()
            rows.append(h.reshape(1, M).v)
        return T(emit("cat", *rows, axis=0))

    return graph_of(results, a=Input("f32", (steps, M)), x=Input("f32", (steps, M)))


def made(graph: Graph) -> Kernels:
    return generate(graph, target=TARGET, hints=SIZES, name="unrolled")


WORK: dict[str, Callable[[Graph, Kernels], Any]] = {
    "passes": lambda graph, kernels: optimize(graph),
    "fusion": lambda graph, kernels: Fuse()(graph),
    "kernels": lambda graph, kernels: made(graph),
    "proofs": prove,
}
OFTEN = 20
"""Calls of a function for each step, from which on it counts by itself: what is quadratic begins small."""


def calls(name: str, steps: int) -> Counter[str]:
    """How often each function of the package is called, and all functions together."""
    graph = unrolled(steps)
    kernels = made(graph) if name == "proofs" else Kernels(())
    clear_cache()  # of which so many answers are kept: what else was asked in this process would decide
    profile = cProfile.Profile()
    profile.runcall(WORK[name], graph, kernels)
    found: Counter[str] = Counter()
    for (file, line, function), (_, count, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        found["all"] += count
        if "fusegrad" in file:
            found[f"{file}:{line} {function}"] += count
    return found


@pytest.mark.parametrize("name", WORK)
def test_twice_the_steps_are_twice_the_calls(name: str) -> None:
    """Of what steps add: the first ones fill caches, and are left out."""
    calls(name, 30)
    few, some, many = (calls(name, n) for n in (50, 100, 200))
    often = [f for f, n in many.items() if n > OFTEN * 200]
    added = {f: (max(some[f] - few[f], some[f] / 3), many[f] - some[f]) for f in often}
    grown = {f: more for f, (before, more) in added.items() if more > 2.5 * before}
    assert "all" in often
    assert not grown
