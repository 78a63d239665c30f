"""Loops run step by step: by kernels of their bodies and calls between these, compiled once for any length."""

from __future__ import annotations

import pytest
import torch
from loop_samples import LENGTHS, Loop, N, T, loops

from fusegrad.ir import Graph, TensorType, building, emit, parse, show, verify
from fusegrad.ir.loops.body import Body
from fusegrad.ir.loops.tidy import TidyLoops
from fusegrad.ir.loops.unroll import at_sizes
from fusegrad.ir.transforms.transpose import vjp
from fusegrad.runtime.execution.aten import reference
from fusegrad.runtime.execution.graph_to_kernels import optimize
from fusegrad.runtime.execution.kernel_plan import KernelPlan
from fusegrad.runtime.persistence import plan_documents
from fusegrad.runtime.settings.counters import stats
from fusegrad.runtime.values.sizes import BoundSizes, numbers

CPU = torch.device("cpu")


def name(loop: Loop) -> str:
    return loop.name


def tensors(graph: Graph, sizes: BoundSizes, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(numbers(v.shape, sizes), generator=generator) * 0.7 for v in graph.inputs)
    return [x > 0 if v.dtype == "b1" else x for v, x in zip(graph.inputs, made, strict=True)]


def in_float32(loop: Loop, reverse: bool) -> Graph:
    """The loop on float32, with something before and after it."""
    return parse(show(loop.graph(reverse)).replace("f64", "f32"))


@pytest.mark.parametrize("loop", loops, ids=name)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_plan_runs_a_loop_of_any_length(loop: Loop, reverse: bool) -> None:
    graph = verify(optimize(in_float32(loop, reverse)))
    plan = KernelPlan(graph, "loop", "interpret", CPU)
    for length in (*LENGTHS, 3):
        sizes = BoundSizes({T: length, N: 4})
        inputs = tensors(graph, sizes, length)
        torch.testing.assert_close(plan(inputs, sizes), reference.run(graph, inputs, sizes), rtol=1e-5, atol=1e-5)


def test_another_length_compiles_nothing() -> None:
    graph = optimize(in_float32(loops[0], False))
    plan = KernelPlan(graph, "loop", "interpret", CPU)
    sizes = [BoundSizes({T: length, N: 4}) for length in (3, 5, 8)]
    plan(tensors(graph, sizes[0]), sizes[0])
    compiled = stats()["compiles"]
    for each in sizes[1:]:
        plan(tensors(graph, each), each)
    assert stats()["compiles"] == compiled and len(list(plan.group_runners())) == 1


@pytest.mark.parametrize("loop", [loops[0], loops[3], loops[5]], ids=name)
def test_gradients_run_too(loop: Loop) -> None:
    graph = verify(optimize(vjp(in_float32(loop, False), range(len(loop.types)))))
    plan = KernelPlan(graph, "pulled", "interpret", CPU)
    for length in LENGTHS:
        sizes = BoundSizes({T: length, N: 4})
        inputs = tensors(graph, sizes, length)
        torch.testing.assert_close(plan(inputs, sizes), reference.run(graph, inputs, sizes), rtol=1e-4, atol=1e-5)


def test_a_loop_says_that_it_runs_step_by_step() -> None:
    reasons: list[str] = []
    rnn = next(loop for loop in loops if loop.name == "rnn")  # float64: no tile of it is multiplied
    KernelPlan(optimize(rnn.graph()), "loop", "interpret", CPU, reasons.append).cut(BoundSizes({T: 3, N: 4}))
    assert "a loop over time runs step by step: its steps are launches of their own" in reasons


def test_carries_that_are_inputs_leave_with_memory_of_their_own() -> None:
    graph = Graph("nothing")
    h, x = graph.input(TensorType((4,), "f32"), "h"), graph.input(TensorType((T, 4), "f32"), "x")
    body = Graph("step")
    with building(body):
        before, each = body.input(TensorType((4,), "f32"), "before"), body.input(TensorType((4,), "f32"), "each")
        body.returning([emit("add", before, each), before])
    with building(graph):
        node = emit("scan", h, x, body=Body(body), carries=1, steps=1, length=T, reverse=False)
        graph.returning([emit("pick", node, index=0), emit("pick", node, index=1), h])
    plan = KernelPlan(graph, "loop", "interpret", CPU)
    for length in (0, 2):
        start, xs = torch.ones(4), torch.ones(length, 4)
        results = plan([start, xs], BoundSizes({T: length}))
        assert len({r.untyped_storage()._cdata for r in [*results, start] if r is not None}) == 4
        assert results[0] is not None and results[0].tolist() == [1.0 + length] * 4


def test_a_stored_plan_has_the_kernels_of_its_loops() -> None:
    graph = optimize(in_float32(loops[3], False))
    plan, sizes = KernelPlan(graph, "loop", "interpret", CPU), BoundSizes({T: 3, N: 4})
    inputs = tensors(graph, sizes)
    expected = plan(inputs, sizes)
    again = plan_documents.plan_of(plan_documents.plan(plan), "loop", "interpret", CPU, lambda why: None)
    symbols = {s.name: s for v in again.graph.inputs for n in v.shape for s in getattr(n, "free_symbols", ())}
    compiled = stats()["compiles"]
    found = again(inputs, BoundSizes({symbols["T"]: 3, symbols["N"]: 4}))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert stats()["compiles"] == compiled


@pytest.mark.parametrize("loop", loops, ids=name)
def test_normal_form_keeps_the_loop(loop: Loop) -> None:
    graph = verify(TidyLoops()(loop.graph()))
    sizes = BoundSizes({T: 5, N: 4})
    inputs = [x.double() if x.dtype != torch.bool else x for x in tensors(graph, sizes)]
    torch.testing.assert_close(reference.run(graph, inputs, sizes), reference.run(loop.graph(), inputs, sizes))
    fixed = verify(at_sizes(graph, {T: 5}))
    torch.testing.assert_close(reference.run(fixed, inputs, sizes), reference.run(loop.graph(), inputs, sizes))
