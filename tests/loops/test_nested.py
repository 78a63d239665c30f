"""A loop in a loop: one graph for all lengths, eager's bits, and what kernels make of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loops.nested import NESTED, Nested
from loops.test_loops import run
from torch import fx

import fusegrad
from fusegrad.tracer.loops.node import loop_of

FIRST, LATER = (12, 15), ((16, 9), (13, 13), (9, 30))


def loops_in(graph: fx.Graph) -> Iterator[Any]:
    """The loops of a graph, those in their bodies included."""
    for node in graph.nodes:
        if (loop := loop_of(node.target)) is not None:
            yield loop
            yield from loops_in(loop.body.graph)


def captures_at(case: Nested, fast: Any, t: int, s: int) -> int:
    """Compares a compiled class with eager at these lengths; the captures that this took."""
    torch.manual_seed(t)
    args = case.make(t, s)
    before = fusegrad.stats()["captures"]
    for wanted, found in zip(run(case.cls, args), run(fast, args), strict=True):
        assert (wanted is None and found is None) or torch.equal(wanted, found)
    return fusegrad.stats()["captures"] - before


@pytest.mark.parametrize("case", NESTED, ids=lambda c: c.name)
def test_one_graph_serves_every_pair_of_lengths(case: Nested) -> None:
    fast = fusegrad.compile(case.cls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert captures_at(case, fast, *FIRST) == 2
        ((spec,),) = fast._fusegrad.table.by_facts.values()
        (entry,) = spec.backward.entries.values()
        traces = spec.captured.forward.trace, entry.trace
        assert tuple(len(list(loops_in(t.graph_module.graph))) for t in traces) == case.loops
        for lengths in LATER:
            assert captures_at(case, fast, *lengths) == 0
        assert fast._fusegrad.ledger.records["forward"].reason is None


@pytest.mark.parametrize("first", [(12, 13), (12, 12)])
def test_sizes_that_are_alike_by_chance_are_no_assumption(first: tuple[int, int]) -> None:
    case = next(c for c in NESTED if c.name == "InARow")
    fast = fusegrad.compile(case.cls)
    for lengths in (first, (9, 30), (20, 10), (10, 20)):
        captures_at(case, fast, *lengths)
    assert captures_at(case, fast, 11, 26) == 0
