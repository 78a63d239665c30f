"""The vjp of a unit whose graph has a loop: by the rules of the IR, where autograd would do the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loop_samples import LENGTHS, Loop, N, T, loops

from fusegrad.ir import parse, show, verify
from fusegrad.ir.transforms.ops import DIFFERENTIABLE
from fusegrad.runtime.execution.aten import reference
from fusegrad.runtime.functorch.vjp_unit import is_differentiable_as_it_is, pulled_graph
from fusegrad.tracer.trace import Trace

aten = torch.ops.aten


def eager(loop: Loop, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """The body step by step, through torch, so that autograd follows it."""
    count, steps = len(loop.init), len(loop.xs)
    carries, xs, wholes = operands[:count], operands[count : count + steps], operands[count + steps :]
    given = []
    for t in range(len(xs[0])):
        results = reference.run(loop.body(), [*carries, *(x[t] for x in xs), *wholes], {N: 4})
        carries = results[:count]
        given.append(results[count:])
    return [*carries, *(torch.stack(part) for part in zip(*given, strict=True))]


@pytest.mark.parametrize("loop", loops, ids=lambda loop: loop.name)
@pytest.mark.parametrize("length", [n for n in LENGTHS if n])
def test_gradients_are_those_of_autograd(loop: Loop, length: int) -> None:
    torch.manual_seed(length)
    sizes, graph = {T: length, N: 4}, loop.graph()
    shapes = [[int(n.subs(sizes)) if hasattr(n, "subs") else n for n in v.shape] for v in graph.inputs]
    operands = [torch.randn(s, dtype=torch.float64) * 0.7 for s in shapes]
    operands = [x > 0 if v.dtype == "b1" else x.requires_grad_() for v, x in zip(graph.inputs, operands, strict=True)]
    outputs = eager(loop, operands)
    bars = [torch.randn_like(o) if i != 1 else None for i, o in enumerate(outputs)]
    needs = [v.dtype in DIFFERENTIABLE and i != len(operands) - 1 for i, v in enumerate(graph.inputs)]
    leaves = [x for x, need in zip(operands, needs, strict=True) if need]
    pairs = [(o, b) for o, b in zip(outputs, bars, strict=True) if b is not None and o.requires_grad]
    expected = iter(torch.autograd.grad([o for o, _ in pairs], leaves, [b for _, b in pairs], allow_unused=True))
    pulled = verify(pulled_graph(graph, operands, bars, needs, "pulled"))
    plain = [x.detach() for x in operands] + [b for b in bars if b is not None]
    for need, mine in zip(needs, reference.run(pulled, plain, sizes), strict=True):
        theirs = next(expected) if need else None
        if mine is None or theirs is None:
            assert mine is None or not mine.any()
            assert theirs is None or not theirs.any()
        else:
            torch.testing.assert_close(mine, theirs)


def test_what_was_taken_from_outside_stands_behind_the_cotangents() -> None:
    graph = loops[3].graph()
    made = pulled_graph(graph, [torch.empty(0)] * 2, [None, torch.empty(0)], [True, True], "pulled")
    assert [v.params["name"] for v in made.inputs] == ["x0", "x1", "bar1", "x2"]
    assert len(made.outputs) == 2 and show(parse(show(made))) == show(made)


# ---------------------------------------------------------------------------------------------- what autograd sees
def traced(function: Any, *values: torch.Tensor) -> Trace:
    gm = torch.fx.experimental.proxy_tensor.make_fx(function)(*values)
    return Trace(gm, list(values))


def _in_a_loop(gm: torch.fx.GraphModule) -> Trace:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")

    def loop(*_: Any) -> None:
        raise AssertionError

    loop.fusegrad_loop = SimpleNamespace(body=gm, carries=1)  # type: ignore[attr-defined]
    graph.output(graph.call_function(loop, (x,)))
    return Trace(torch.fx.GraphModule({}, graph), [])


def test_what_is_detached_is_left_to_autograd() -> None:
    x = torch.randn(3)
    assert is_differentiable_as_it_is(traced(lambda x: x.sin() * 2, x))
    assert is_differentiable_as_it_is(traced(lambda x: x * torch.zeros_like(x).detach(), x))
    assert is_differentiable_as_it_is(traced(lambda x: x * (x > 0).detach(), x))
    cut = traced(lambda x: x * x.sin().detach(), x)
    assert not is_differentiable_as_it_is(cut)
    assert not is_differentiable_as_it_is(_in_a_loop(cut.graph_module))
    assert is_differentiable_as_it_is(_in_a_loop(traced(lambda x: x.sin(), x).graph_module))
    cut.inlines = True
    assert not is_differentiable_as_it_is(cut)
