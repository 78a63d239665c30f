"""Operations by the shortest way: methods of tensors that are the operation, and only those."""

from __future__ import annotations

import pytest
import torch

from fusegrad.runtime.execution.aten.replay import compile_fx
from fusegrad.runtime.execution.aten.unboxed_ops import bind_operations
from fusegrad.tracer.capture.capture import Session
from fusegrad.tracer.reads.reads import scan

BODIES = {
    "pointwise": lambda x, y: (x * y + 2.5, (x - y) / 3, x**2, 2 - x, x.clamp(0, 1), torch.where(x > 0, x, y)),
    "reductions": lambda x, y: (x.sum(), x.sum(0), x.mean(-1, keepdim=True), x.amax((0, 1)), *x.max(0), x.std(1)),
    "types": lambda x, y: (x.to(torch.float64), x.sum(0, dtype=torch.float64), x.half(), (x > 0).long(), x.softmax(-1)),
    "shapes": lambda x, y: (x.t(), x.unsqueeze(1).expand(-1, 2, -1), x[1:, ::2], x.reshape(-1), x.flatten().clone()),
    "several": lambda x, y: (*x.sort(-1), *x.split(2, 1), torch.cat([x, y]), x @ y.t(), x.cumsum(0)),
    "made": lambda x, y: (torch.zeros_like(x), torch.arange(x.shape[1]), x.new_ones(x.shape[0]), torch.full((2,), 3.0)),
    "in place": lambda x, y: (x.clone().mul_(y).add_(1), torch.zeros_like(x).copy_(y)),
    "sizes": lambda x, y: (x / x.shape[0], x.sum(0).expand(x.shape), x.narrow(0, 0, x.shape[0] - 1), x.tril()),
}


def traced(body):
    session, given = Session(), (torch.randn(3, 4), torch.randn(3, 4))
    return session, session.trace(body, [session.fake(t) for t in given], scan(body))


@pytest.mark.parametrize("name", BODIES)
def test_a_replay_is_bitwise_the_body(name) -> None:
    body = BODIES[name]
    session, found = traced(body)
    guards = len(session.env.guards)
    replay = compile_fx(found.graph_module)
    assert len(session.env.guards) == guards, "a trial assumed something of the sizes"
    for rows in (3, 5):
        x, y = torch.randn(rows, 4), torch.randn(rows, 4)
        for mine, theirs in zip(replay(x, y), body(x, y), strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs) and mine.stride() == theirs.stride()


def test_methods_are_taken_where_they_are_the_operation() -> None:
    _, found = traced(lambda x, y: ((x * y).sum(0), x.clone().mul_(y), torch.zeros_like(x)))
    chosen = bind_operations([n for n in found.graph_module.graph.nodes if n.op == "call_function"])
    by_name = {n.target._schema.name: call for n, call in chosen.items()}
    assert by_name["aten::mul"] is torch.Tensor.mul and by_name["aten::sum"] is torch.Tensor.sum
    assert by_name["aten::mul_"] is not torch.Tensor.mul_  # what writes stays the operation itself
    assert by_name["aten::zeros_like"] is not getattr(torch.Tensor, "zeros_like", None)


def test_nothing_runs_in_a_trial() -> None:
    _, found = traced(lambda x, y: (x.exp() * y,))
    nodes = [n for n in found.graph_module.graph.nodes if n.op == "call_function"]
    versions = [n.meta["val"]._version for n in nodes]
    with torch.autocast("cpu", torch.bfloat16):
        assert bind_operations(nodes)[nodes[-1]] is torch.Tensor.mul
    assert [n.meta["val"]._version for n in nodes] == versions
