"""What the transforms derive from the captured forwards of functions.py is what torch's autograd says of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fusegrad
from fusegrad.ir import Graph, Value, verify
from fusegrad.ir.evaluate import evaluate
from fusegrad.ir.prims import PRIMS
from fusegrad.ir.transforms.linearize import linearize
from fusegrad.ir.transforms.transpose import vjp
from fusegrad.tracer.lowering.aten import lower

sys.path.insert(0, str(Path(__file__).parent))
from functions import CASES, Case

NOT_EVALUATED = {
    "Fp8Cast": "the evaluator does not round to eight bits",
    "MixedDtypes": "the evaluator does not round to bfloat16",
    "SegmentMean": "the size of a result depends on data",
}
LIBRARY = set(
    "CrossEntropyOneHot LinearCrossEntropy Sparsemax TopK SortRows CumProd Conv1d ComplexProduct Fft FillDiag "
    "PoolUpsample Conv2dRelu Comparisons NestedHelper NoSaved LogSumExpPairs SpecialFns".split()
)
"""Their forward calls the library, whose rules are supplied from outside, or has no gradient at all."""


def forward_of(case: Case) -> tuple[Graph, Any, list[torch.Tensor]]:
    """The graph of forward in float64, the captured module, and its arguments."""
    torch.manual_seed(0)
    args = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in case.make(4)]
    leaves = [a.requires_grad_(a.is_floating_point()) for a in args if isinstance(a, torch.Tensor)]
    trace = fusegrad.compile(case.cls, dynamic=False)._fusegrad.specialization(args).captured.forward.trace
    return lower(trace.graph_module, [*trace.fakes, *trace.lifted]), trace.graph_module, [*leaves, *trace.lifted]


def library(value: Value, operands: Sequence[Any], sizes: Mapping[Any, int]) -> Any:
    """The one library call that a derivative is made of here."""
    assert value.params["op"] == "aten.cumprod.default"
    return np.cumprod(operands[0], value.params["spec"][0][1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [c for c in CASES if c.name not in NOT_EVALUATED], ids=lambda c: c.name)
def test_the_derived_gradient_is_autograds(case: Case) -> None:
    graph, module, leaves = forward_of(case)
    outputs = module(*leaves)
    given = [i for i, o in enumerate(outputs) if o is not None and o.requires_grad and o.is_floating_point()]
    only_primitives = not any(PRIMS[v.prim].family == "extern" for v in graph.order())
    if not (only_primitives and given):
        assert case.name in LIBRARY
        return
    wrt = [i for i, t in enumerate(leaves) if t.requires_grad]
    bars = [torch.randn_like(outputs[i]) for i in given]
    expected = torch.autograd.grad([outputs[i] for i in given], [leaves[i] for i in wrt], bars, allow_unused=True)
    inputs = [t.detach().numpy() for t in leaves]
    found = evaluate(verify(vjp(graph, wrt, given)), [*inputs, *(b.numpy() for b in bars)], {}, library)
    for mine, theirs in zip(found, expected, strict=True):
        same(mine, theirs)
    dots = [torch.randn_like(leaves[i]).numpy() for i in wrt]
    pushed = evaluate(verify(linearize(graph, wrt)), [*inputs, *dots], {}, library)
    there = sum(float((pushed[i] * b.numpy()).sum()) for i, b in zip(given, bars, strict=True) if pushed[i] is not None)
    back = sum(float((x * t).sum()) for x, t in zip(found, dots, strict=True) if x is not None)
    assert np.isclose(there, back, rtol=1e-9, atol=1e-9)


def same(mine: Any, theirs: torch.Tensor | None) -> None:
    """Equal numbers, computed in another order; None is zero."""
    if mine is None or theirs is None:
        assert not np.any(mine if theirs is None else theirs.numpy())
    else:
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-5, atol=1e-6)
