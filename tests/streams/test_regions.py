"""Regions of every class of stream_functions.py: what is merged computes the same, and nothing virtual crosses it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fusegrad
from fusegrad.ir import Graph
from fusegrad.ir.evaluate import evaluate
from fusegrad.ir.passes.fuse import Fuse, Group, Step
from fusegrad.ir.passes.products import Machine
from fusegrad.ir.passes.streams import StreamDecision, Streams
from fusegrad.ir.passes.virtual import virtual_values
from fusegrad.ir.rewrite import extract

sys.path.insert(0, str(Path(__file__).parent))
from stream_functions import CASES, Case

SLOW_MEMORY = Machine(1e9, {"f16": 1e15, "bf16": 1e15, "f32": 1e15})
"""Where whatever need not be in memory should not be."""
each = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
both = pytest.mark.parametrize("direction", ["forward", "backward"])
SAVES_A_VIRTUAL_VALUE = {("LogSoftmaxDropout", "forward"), ("SavedProbabilities", "forward")}


@cache
def graphs(name: str) -> tuple[dict[str, Graph], dict[Any, int]]:
    """The graphs of a class, and the sizes of its arguments."""
    case = next(c for c in CASES if c.name == name)
    arguments = case.arguments(37, 16)
    directions = fusegrad.explain(case.cls, *arguments).directions
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    pairs = [p for v, t in zip(directions["forward"].graph.inputs, tensors, strict=True) for p in zip(v.shape, t.shape)]
    return {d: directions[d].graph for d in ("forward", "backward")}, {s: n for s, n in pairs if not isinstance(s, int)}


def divided(case: Case, direction: str) -> tuple[Graph, list[Step], list[StreamDecision], dict[Any, int]]:
    found, sizes = graphs(case.name)
    graph = found[direction]
    return graph, *Streams(SLOW_MEMORY, sizes)(graph, Fuse()(graph)), sizes


def run(graph: Graph, steps: Sequence[Step], inputs: Sequence[Any], sizes: dict[Any, int]) -> list[Any]:
    """The results of the steps in their order, each reading what is in memory by then."""
    memory = dict(zip((v.id for v in graph.inputs), inputs, strict=True))
    for step in steps:
        part = step.graph if isinstance(step, Group) else extract([step.value], list(dict.fromkeys(step.reads)), name="")
        made = evaluate(part, [memory[v.id] for v in dict.fromkeys(step.reads)], sizes)
        memory.update(zip((v.id for v in step.results), made, strict=True))
    return [None if o is None else memory[o.id] for o in graph.outputs]


def numbers(graph: Graph, sizes: dict[Any, int]) -> list[np.ndarray]:
    """Inputs of a graph: floats, flags, and small whole numbers that are indices of anything."""
    rng = np.random.default_rng(1)
    shapes = [tuple(int(n.xreplace(sizes)) if hasattr(n, "xreplace") else n for n in v.shape) for v in graph.inputs]
    drawn = {"f32": lambda s: rng.normal(size=s), "b1": lambda s: rng.random(s) < 0.9}
    return [drawn.get(v.dtype, lambda s: rng.integers(0, 30, s))(s) for v, s in zip(graph.inputs, shapes, strict=True)]


@each
@both
def test_merged_steps_compute_the_same(case: Case, direction: str) -> None:
    graph, steps, _, sizes = divided(case, direction)
    inputs = numbers(graph, sizes)
    for a, b in zip(evaluate(graph, inputs, sizes), run(graph, steps, inputs, sizes), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-12)


@each
@both
def test_nothing_virtual_crosses_a_boundary(case: Case, direction: str) -> None:
    graph, steps, decisions, sizes = divided(case, direction)
    virtual = virtual_values(graph, sizes)
    assert virtual and decisions
    if (case.name, direction) in SAVES_A_VIRTUAL_VALUE:
        (decision,) = decisions
        assert not decision.streamed and "is returned" in str(decision)
        return
    assert all(d.streamed and "never in memory" in str(d) for d in decisions)
    assert not [v for s in steps for v in (*s.reads, *s.results) if v.id in virtual]


@each
@both
def test_what_surrounds_a_region_is_part_of_it(case: Case, direction: str) -> None:
    """Copies of operands and what finishes a result: besides the regions there is no group that reads one."""
    graph, steps, decisions, _ = divided(case, direction)
    if (case.name, direction) not in SAVES_A_VIRTUAL_VALUE:
        groups = [s for s in steps if isinstance(s, Group)]
        assert [g for g in groups if all(g is not d.group for d in decisions)] == []
