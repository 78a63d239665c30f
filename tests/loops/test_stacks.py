"""`ctx.save_for_backward(x, *hs)`: lists as long as a loop are one tensor in its graph, and backward's as they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from loops.fuzz_loops import graphs_of
from torch import Tensor
from torch.autograd import Function

import fusegrad
from fusegrad.tracer.loops.node import has_loop

ANY = Any


class Listed(Function):
    """Two lists of different shapes, saved between arguments; the last state is returned, too."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, w: Tensor) -> ANY:
        h, hs, sums = torch.zeros_like(x[0]), list[Tensor](), list[Tensor]()
        for xt in x.unbind(0):
            sums.append(h.sum(-1))
            h = torch.tanh(w * h + xt)
            hs.append(h)
        ctx.save_for_backward(x, *hs, w, *sums)
        return torch.stack(hs), h

    @staticmethod
    def backward(ctx: ANY, g: Tensor, last: Tensor) -> ANY:
        rest = ctx.saved_tensors[1:]
        steps = len(rest) // 2
        hs, w, sums = rest[:steps], rest[steps], rest[steps + 1 :]
        gh, gw, gx = last, torch.zeros_like(w), list[Tensor]()
        for t in range(steps - 1, -1, -1):
            gz = (gh + g[t]) * (1 - hs[t] ** 2)
            gw = gw + (gz * (hs[t - 1] if t else 0 * gz)).sum(0) + 0 * sums[t].sum()
            gx.insert(0, gz)
            gh = gz * w
        return torch.stack(gx), gw


def arguments(steps: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(steps)
    return torch.randn(steps, 2, 3, dtype=dtype, requires_grad=True), torch.rand(3, dtype=dtype, requires_grad=True)


def outcome(cls: Any, args: Sequence[Tensor]) -> list[Tensor]:
    outs = cls.apply(*args)
    torch.manual_seed(0)
    return [*outs, *torch.autograd.grad(outs, args, [torch.randn_like(o) for o in outs])]


def require_same(fast: Any, cls: Any, steps: int, dtype: torch.dtype = torch.float32) -> None:
    args = arguments(steps, dtype)
    for a, b in zip(outcome(fast, args), outcome(cls, args), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_graph_serves_all_lengths(dtype: torch.dtype) -> None:
    fast = fusegrad.compile(Listed)
    for steps in (12, 20, 31):
        require_same(fast, Listed, steps, dtype)
    graphs = graphs_of(fast)
    assert len(graphs) == 2
    assert all(map(has_loop, graphs))
    assert [fast._fusegrad.ledger.records[m].reason for m in ("forward", "backward")] == [None, None]


def test_the_node_shows_what_was_saved() -> None:
    fast, args = fusegrad.compile(Listed), arguments(12)
    outcome(fast, args)
    node, eager = (c.apply(*args)[0].grad_fn for c in (fast, Listed))
    for a, b in zip(node.saved_tensors, eager.saved_tensors, strict=True):
        assert torch.equal(a, b)
        assert (a.stride(), a.requires_grad) == (b.stride(), b.requires_grad)


def test_the_users_own_backward_is_shown_them() -> None:
    fast = fusegrad.compile(Listed)
    require_same(fast, Listed, 12)
    for specs in fast._fusegrad.table.by_facts.values():
        for spec in specs:
            spec.backward.failed = True
    for steps in (12, 20):
        require_same(fast, Listed, steps)


def test_short_loops_are_traced_step_by_step() -> None:
    fast = fusegrad.compile(Listed)
    for steps in (12, 3, 1, 20):
        require_same(fast, Listed, steps)


def test_kernels() -> None:
    args = arguments(12, torch.float64)
    with fusegrad.config.patch(backend="interpret", disable="patience"):
        found = outcome(fusegrad.compile(Listed), args)
    for a, b in zip(found, outcome(Listed, args), strict=True):
        torch.testing.assert_close(a, b)


def test_transforms() -> None:
    x, w = (a.detach() for a in arguments(12, torch.float64))
    fast = fusegrad.compile(Listed)
    xs = torch.stack([x, 0.9 * x])
    for a, b in zip(torch.func.vmap(fast.apply, (0, None))(xs, w), Listed.apply(x, w), strict=True):
        torch.testing.assert_close(a[0], b)

    def loss(apply: Any, x: Tensor) -> Tensor:
        return sum(o.sin().sum() for o in apply(x, w))  # type: ignore[return-value]

    tangent = torch.func.jvp(lambda x: loss(fast.apply, x), (x,), (x.cos(),))[1]
    grad = torch.func.grad(lambda x: loss(fast.apply, x))(x)
    torch.testing.assert_close(tangent, (grad * x.cos()).sum())


def twice(cls: Any, args: Sequence[Tensor]) -> Sequence[Tensor]:
    grads = torch.autograd.grad(sum(o.sin().sum() for o in cls.apply(*args)), args, create_graph=True)
    return torch.autograd.grad(sum(g.cos().sum() for g in grads), args)


def test_twice_is_eagers_as_saved_lists_have_no_history() -> None:
    args = arguments(12, torch.float64)
    for a, b in zip(twice(fusegrad.compile(Listed), args), twice(Listed, args), strict=True):
        torch.testing.assert_close(a, b)


def test_hooks_pack_each_tensor_once() -> None:
    """Contract, 12; and what they hand back is what backward reads. A call without hooks comes before and behind."""
    fast, args = fusegrad.compile(Listed), arguments(12)

    def packed(cls: Any) -> tuple[list[Tensor], list[Tensor]]:
        seen: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t * 0.5):  # type: ignore[func-returns-value]
            found = outcome(cls, args)
        return found, seen

    for _ in range(3):
        require_same(fast, Listed, 12)
        (found, seen), (eager, eagers) = packed(fast), packed(Listed)
        assert len(seen) == len(eagers) == 26
        for a, b in zip([*found, *seen], [*eager, *eagers], strict=True):
            assert torch.equal(a, b)
        with torch.autograd.graph.save_on_cpu():
            require_same(fast, Listed, 20)
