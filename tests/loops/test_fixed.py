"""Iterations of a fixed number: one node where they are many operations; eager's bits, for all sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops.test_loops import run
from loops.test_nested import loops_in
from torch import Tensor
from torch.autograd import Function

import fusegrad
from fusegrad.benchmarks.functions import FusedLinearCrossEntropy
from fusegrad.tracer.loops import rolling


class Sinkhorn(Function):
    """Row and column normalisation in turn; backward takes as many steps back."""

    turns = 40

    @staticmethod
    def forward(ctx: Any, cost: Tensor) -> Tensor:
        u, v = torch.zeros_like(cost[:, 0]), torch.zeros_like(cost[0])
        for _ in range(Sinkhorn.turns):
            u = -torch.logsumexp(v - cost, 1)
            v = -torch.logsumexp(u[:, None] - cost, 0)
        plan = torch.exp(u[:, None] + v - cost)
        ctx.save_for_backward(plan)
        return plan

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (plan,) = ctx.saved_tensors
        g = g * plan
        for _ in range(Sinkhorn.turns):
            g = g - plan * (g.sum(1, keepdim=True) / plan.sum(1, keepdim=True))
            g = g - plan * (g.sum(0) / plan.sum(0))
        return -g


class Newton(Function):
    """The cube root by Newton's steps; backward by the implicit function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.ones_like(x)
        for _ in range(30):
            y = y - (y * y * y - x) / (3 * y * y + 1e-3)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return g / (3 * y * y + 1e-3)


class RungeKutta(Function):
    """A pendulum in 16 steps of the classical method, all its states; the number of the step is read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, force: Tensor) -> Tensor:
        def slope(x: Tensor, f: Tensor) -> Tensor:
            return torch.stack([x[1], -torch.sin(x[0]) + f])

        states, dt = [x], 0.1
        for t in range(16):
            k1 = slope(x, force[t])
            k2 = slope(x + dt / 2 * k1, force[t])
            k3 = slope(x + dt / 2 * k2, force[t])
            k4 = slope(x + dt * k3, force[t])
            x = x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            states.append(x)
        return torch.stack(states)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.sum(0), None


class Descent(Function):
    """Gradient descent with momentum on a least-squares problem, unrolled."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        x, m = torch.zeros_like(a[0]), torch.zeros_like(a[0])
        for i in range(25):
            m = 0.9 * m + (a * (a @ x - b)[:, None]).sum(0)
            x = x - 0.01 * m / (i + 1)
        ctx.save_for_backward(a)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (a,) = ctx.saved_tensors
        return torch.zeros_like(a), a @ g


class Halves(Function):
    """Two values of each turn in one list, behind the one that it begins with; and those of another one backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        states, sums = [x], list[Tensor]()
        for _ in range(30):
            y = torch.tanh(x * 1.5)
            x = y - y.mean(1, keepdim=True)
            states += [y, x]
            sums.append(y.sum(1, keepdim=True))
        return torch.stack(states, 1), torch.cat(sums[::-1], 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
        return g.sum(1) * h.sum()


FIXED: dict[type, tuple[Callable[[int], tuple[Tensor, ...]], tuple[int, int]]] = {
    Sinkhorn: (lambda n: (torch.rand(n, n + 2).requires_grad_(),), (1, 1)),
    Newton: (lambda n: (torch.rand(n).requires_grad_(),), (1, 0)),
    RungeKutta: (lambda n: (torch.randn(2, n, requires_grad=True), torch.randn(16, n)), (1, 0)),
    Descent: (lambda n: (torch.rand(n + 2, n).requires_grad_(), torch.rand(n + 2).requires_grad_()), (1, 0)),
    Halves: (lambda n: (torch.randn(3, n).requires_grad_(),), (1, 0)),
}


@pytest.mark.parametrize("cls", FIXED, ids=lambda c: c.__name__)
def test_many_turns_are_one_node(cls: type) -> None:
    make, loops = FIXED[cls]
    fast, captures = fusegrad.compile(cls), []
    for n in (5, 7, 30):
        torch.manual_seed(n)
        args, before = make(n), fusegrad.stats()["captures"]
        for wanted, found in zip(run(cls, args), run(fast, args), strict=True):
            assert wanted is found is None or torch.equal(wanted, found)
        captures.append(fusegrad.stats()["captures"] - before)
    assert captures == [2, 0, 0]
    ((spec,),) = fast._fusegrad.table.by_facts.values()
    (entry,) = spec.backward.entries.values()
    traces = spec.captured.forward.trace, entry.trace
    assert tuple(len(list(loops_in(t.graph_module.graph))) for t in traces) == loops


def test_few_turns_are_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sinkhorn, "turns", 5)
    fast, (x,) = fusegrad.compile(Sinkhorn), FIXED[Sinkhorn][0](4)
    assert torch.equal(fast.apply(x), Sinkhorn.apply(x))
    ((spec,),) = fast._fusegrad.table.by_facts.values()
    assert not list(loops_in(spec.captured.forward.trace.graph_module.graph))


def test_another_number_of_turns_is_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, (x,) = fusegrad.compile(Sinkhorn), FIXED[Sinkhorn][0](4)
    for turns in (20, 30):
        monkeypatch.setattr(Sinkhorn, "turns", turns)
        assert torch.equal(fast.apply(x), Sinkhorn.apply(x))


@pytest.mark.parametrize("cls", [Newton, Descent, Halves], ids=lambda c: c.__name__)
def test_kernels_of_them_are_near(cls: type) -> None:
    args = FIXED[cls][0](5)
    with fusegrad.config.patch(backend="interpret"):
        found = run(fusegrad.compile(cls), args)
    for a, b in zip(run(cls, args), found, strict=True):
        assert a is b is None or torch.allclose(a, b, atol=1e-5)


def test_lists_of_turns_are_stored_by_them() -> None:
    """Not as stacks of each value, of which another kernel makes the list."""
    found = fusegrad.explain(fusegrad.compile(Halves), torch.empty(3, 32, requires_grad=True), target="cuda:90")
    forward = found.directions["forward"]
    assert forward.launch_count == 1 and forward.moved <= 1.05 * forward.minimal


def test_a_derived_backward_goes_through_them() -> None:
    def settle(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(70):
            x = torch.tanh(x * w) + 0.1
        return x

    x, w = torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)
    found = torch.autograd.grad(fusegrad.compile(settle)(x, w).sum(), (x, w))
    for a, b in zip(torch.autograd.grad(settle(x, w).sum(), (x, w)), found, strict=True):
        torch.testing.assert_close(b, a)


def test_chunks_whose_products_are_large_stay_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rolled, the products of all chunks would be made at once: what the class is written to avoid."""

    def explained() -> tuple[bool, dict[str, int]]:
        arguments = ("bf16[4096,512]", "bf16[4096,512]", "i64[4096]", 512)
        found = fusegrad.explain(fusegrad.compile(FusedLinearCrossEntropy), *arguments, target="cuda:90")
        graph = found.directions["forward"].graph
        assert graph is not None
        return any(v.prim == "scan" for v in graph.order()), found.to_dict()["peak_memory"]["forward"]

    is_rolled, peak = explained()
    assert not is_rolled and peak["own"] <= peak["eager"]
    monkeypatch.setattr(rolling, "LARGE", 1 << 40)
    assert explained()[0]
