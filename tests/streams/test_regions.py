"""Every class of stream_functions.py in steps: what is merged does what eager does, and nothing virtual crosses it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusegrad.ir import Graph, Program
from fusegrad.ir.evaluate import evaluate
from fusegrad.ir.passes.fuse import Fuse, Group, Step
from fusegrad.ir.passes.products import Machine
from fusegrad.ir.passes.programs.recompute import hidden_values, made_in_forward, present, value_at
from fusegrad.ir.passes.programs.streamed import Streamed
from fusegrad.ir.passes.streaming.streams import StreamDecision, Streams
from fusegrad.ir.passes.virtual import sums_of, virtual_values
from fusegrad.ir.rewrite import extract
from fusegrad.runtime.capture.captured_backward import predicted_kinds
from fusegrad.runtime.execution.graph_to_kernels import optimize
from fusegrad.runtime.report.explain import compiler_of
from fusegrad.runtime.specialize.residuals import program_of

sys.path.insert(0, str(Path(__file__).parent))
from stream_functions import CASES, Case

SLOW_MEMORY = Machine(1e9, {"f16": 1e15, "bf16": 1e15, "f32": 1e15})
"""Where whatever need not be in memory should not be."""
each = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
both = pytest.mark.parametrize("direction", ["forward", "backward"])
Sizes = dict[Any, int]
Divided = tuple[Graph, list[Step], list[StreamDecision]]


@cache
def captured(case: Case) -> tuple[Program, Sizes]:
    """A class as it is captured, and the sizes of its arguments."""
    arguments = case.arguments(37, 16)
    spec = compiler_of(case.cls).captures.only(arguments)
    entry = spec.backward.entry(predicted_kinds(spec.captured))
    return program_of(spec.captured, entry), dict(spec.captured.sizes(arguments))


@cache
def divided(case: Case) -> tuple[Program, Divided, Divided]:
    """The program that saves nothing virtual; its graphs, their steps and what was decided of them."""
    program, sizes = captured(case)
    program = Streamed(sizes)(program)
    forward, backward = program.forward, next(iter(program.backward.values()))
    return program, _divided(optimize(forward), sizes), _divided(optimize(backward), sizes)


def _divided(graph: Graph, sizes: Sizes) -> Divided:
    return graph, *Streams(SLOW_MEMORY, sizes)(graph, Fuse()(graph))


def run(division: Divided, inputs: Sequence[Any], sizes: Sizes) -> list[Any]:
    """The results of the steps in their order, each reading what is in memory by then."""
    graph, steps, _ = division
    memory = dict(zip((v.id for v in graph.inputs), inputs, strict=True))
    for step in steps:
        read = list(dict.fromkeys(step.reads))
        part = step.graph if isinstance(step, Group) else extract([step.value], read, name="one")
        made = evaluate(part, [memory[v.id] for v in read], sizes)
        memory.update(zip((v.id for v in step.results), made, strict=True))
    return [None if o is None else memory[o.id] for o in graph.outputs]


def in_eager(case: Case) -> tuple[list[Any], Any, Any, list[Any]]:
    """The arguments that are tensors, the result, a gradient of it, and the gradients of the arguments, in float64."""
    arguments = case.arguments(37, 16, torch.float64)
    result = case.cls.apply(*arguments)
    gradient = torch.randn(result.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    asked = [a for a in tensors if a.requires_grad]
    found = torch.autograd.grad(result, asked, gradient, allow_unused=True)
    numbers = [None if g is None else g.numpy() for g in found]
    return [a.detach().numpy() for a in tensors], result.detach().numpy(), gradient.numpy(), numbers


@each
def test_the_merged_steps_of_both_methods_compute_what_eager_does(case: Case) -> None:
    program, forward, backward = divided(case)
    _, sizes = captured(case)
    inputs, result, gradient, expected = in_eager(case)
    results = run(forward, inputs, sizes)
    np.testing.assert_allclose(results[0], result, rtol=1e-11, atol=1e-11)
    places = {"input": inputs, "output": results[:1], "hidden": results[program.user_outputs :]}
    residuals = [places[p.kind][p.index] for p in present(program)]
    made = [g for g in run(backward, [*residuals, gradient], sizes) if g is not None]
    wanted = [g for g in expected if g is not None]
    assert len(made) == len(wanted)
    for a, b in zip(wanted, made, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-10, atol=1e-10)


@each
@both
def test_nothing_virtual_crosses_a_boundary(case: Case, direction: str) -> None:
    graph, steps, decisions = divided(case)[1 + (direction == "backward")]
    virtual = virtual_values(graph, captured(case)[1])
    assert virtual and decisions
    assert all(d.streamed and "never in memory" in str(d) for d in decisions)
    assert not [v for s in steps for v in (*s.reads, *s.results) if v.id in virtual]


@each
@both
def test_what_surrounds_a_region_is_part_of_it(case: Case, direction: str) -> None:
    """Copies of operands, and what finishes a result."""
    _, steps, decisions = divided(case)[1 + (direction == "backward")]
    assert all(any(s is d.group for d in decisions) for s in steps if isinstance(s, Group))


@each
def test_nothing_virtual_is_saved(case: Case) -> None:
    program, sizes = divided(case)[0], captured(case)[1]
    virtual = virtual_values(program.forward, sizes)
    assert virtual and not [v for v in hidden_values(program) if v.id in virtual]


SAVED = {
    "SavedProbabilities": ["amax", "sum", "dot"],  # the last is the result, in memory that the caller has not
    "LogSoftmaxDropout": ["amax", "log", "dot"],
    "SavedLogSumExp": ["reshape"],
    "InfoNCE": ["amax", "amax"],  # the sums are of other exponentials: logsumexp looks for infinities
    **{name: [] for name in ("SigmoidAttention", "DecayingAttention", "SigLIP", "Distances")},
}
"""What is handed over besides what the user saves of arguments and results; by default two rows of a softmax."""


@each
def test_rows_are_saved_whether_the_user_saves_or_computes_again(case: Case) -> None:
    assert [v.prim for v in hidden_values(divided(case)[0])] == SAVED.get(case.name, ["amax", "sum"])


@each
def test_no_row_of_backward_is_computed_again(case: Case) -> None:
    """Every sum of forward that backward has is handed over."""
    program, (graph, *_) = divided(case)[0], divided(case)[2]
    again = made_in_forward(program, graph).values()
    virtual = virtual_values(program.forward, captured(case)[1])
    assert not {v.id for v in sums_of(program.forward.order(), virtual)} & {v.id for v in again} - residual_ids(program)


def residual_ids(program: Program) -> set[int]:
    return {v.id for p in present(program) if (v := value_at(program, p)) is not None}


@pytest.mark.parametrize("name", ["SavedProbabilities", "LogSoftmaxDropout"])
def test_the_row_sums_of_backward_are_those_of_the_result(name: str) -> None:
    """(p * dp).sum(-1) is (g * out).sum(-1): no sum of backward reads a virtual value."""
    case = next(c for c in CASES if c.name == name)
    graph, *_ = divided(case)[2]
    virtual = virtual_values(graph, captured(case)[1])
    assert [v.prim for v in sums_of(graph.order(), virtual)] == ["dot", "dot", "dot"]


def test_a_saved_virtual_value_keeps_forward_in_memory() -> None:
    case = next(c for c in CASES if c.name == "SavedProbabilities")
    program, sizes = captured(case)
    _, _, (decision,) = _divided(program.forward, sizes)
    assert not decision.streamed and "is returned or saved" in str(decision)
