"""Random graphs through the generator, on targets that hold rows, chunk them, and finish in two levels."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch

from fusegrad.codegen import TARGETS, Target
from fusegrad.ir import Graph, TensorType, building, emit
from fusegrad.runtime.execution.aten import reference
from fusegrad.runtime.execution.graph_to_kernels import optimize
from fusegrad.runtime.execution.kernel_plan import KernelPlan
from fusegrad.runtime.values.sizes import BoundSizes, number
from fusegrad.tracer.dtypes import TO_TORCH


def _grower():
    """The generator of random graphs that the tests of `ir` use."""
    path = Path(__file__).parents[1] / "ir" / "conftest.py"
    spec = importlib.util.spec_from_file_location("fusegrad_random_graphs", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RANDOM = _grower()
BATCHES = (1, 2, 3, 5, 17, 33, 70)
CHUNKED = Target("interpret", "", units=4, l2=50 << 20, shared=2)
TWO_LEVELS = Target("interpret", "", units=20, l2=50 << 20, shared=16)


def tensors(graph: Graph, sizes: BoundSizes, seed: int) -> list[torch.Tensor]:
    """Small dyadic numbers, so that sums of them are exact."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for value in graph.inputs:
        shape = [number(n, sizes) for n in value.shape]
        whole = torch.randint(-8, 9, shape, generator=generator).double()
        made.append(whole > 0 if value.dtype == "b1" else (whole / 4).to(TO_TORCH[value.dtype]))
    return made


@pytest.mark.parametrize("seed", range(120))
def test_kernels_compute_what_the_graph_says(seed):
    rng = random.Random(seed)
    graph = RANDOM.Grower(seed + 20_000).grow(rng.randint(4, 24))
    graph = optimize(graph) if rng.random() < 0.5 else graph
    plan = KernelPlan(graph, "kernel", "interpret", torch.device("cpu"))
    plan.target = rng.choice((TARGETS["interpret"], CHUNKED, TWO_LEVELS))
    for batch in rng.sample(BATCHES, 2):
        sizes = BoundSizes({RANDOM.M: batch})
        inputs = tensors(graph, sizes, seed)
        expected = reference.run(graph, inputs, sizes)
        for output, mine, theirs in zip(graph.outputs, plan(inputs, sizes), expected, strict=True):
            low = output.dtype in ("bf16", "f16")
            tolerance = {"rtol": 2e-2, "atol": 2e-2} if low else {"rtol": 3e-5, "atol": 1e-5}
            torch.testing.assert_close(mine, theirs, equal_nan=True, **tolerance)


def test_a_flipped_concatenation_of_a_merged_axis():
    """Refining an axis that is walked backwards: its inner part has to have a positive length."""
    graph = Graph("flipped")
    x = graph.input(TensorType((2, RANDOM.M), "f32"), "x")
    with building(graph):
        flat = emit("reshape", x, shape=(2 * RANDOM.M,))
        y = emit("flip", emit("exp", emit("cat", flat, flat, axis=0)), axes=(0,))
    plan = KernelPlan(graph.returning([y]), "kernel", "interpret", torch.device("cpu"))
    (mine,) = plan([torch.arange(6.0).reshape(2, 3)], BoundSizes({RANDOM.M: 3}))
    torch.testing.assert_close(mine, torch.arange(6.0).repeat(2).flip(0).exp())
