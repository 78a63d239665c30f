"""Transforms of a class whose loop was rolled: eager's values, from graphs that have the loop or all its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops.recurrences import Gated
from torch import Tensor
from torch.autograd import Function
from torch.func import grad, jacrev, vmap

import fusegrad
from fusegrad.runtime.execution.graph_to_kernels import graph_of


class Composable(Function):
    """The gated recurrence with setup_context, so that torch.func takes it in eager, too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, x: Tensor) -> Tensor:
        h, hs = torch.zeros_like(x[0]), []
        for t in range(x.shape[0]):
            h = a[t] * h + x[t]
            hs.append(h)
        return torch.stack(hs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    backward = Gated.backward


def twice(apply: Callable[..., Tensor], a: Tensor, x: Tensor) -> Any:
    a, x = a.clone().requires_grad_(), x.clone().requires_grad_()
    first = torch.autograd.grad((apply(a, x) ** 2).sum(), (a, x), create_graph=True)
    return torch.autograd.grad(sum((g**2).sum() for g in first), (a, x))


WAYS: dict[str, Callable[..., Any]] = {
    "twice": twice,
    "grad": lambda apply, a, x: grad(lambda a, x: apply(a, x).pow(2).sum(), (0, 1))(a, x),
    "vmap": lambda apply, a, x: [vmap(apply)(torch.stack([a, a + 1]), torch.stack([x, x]))],
    "vmap of grad": lambda apply, a, x: [
        vmap(grad(lambda a, x: apply(a, x).pow(2).sum()))(torch.stack([a, a + 1]), torch.stack([x, x]))
    ],
    "jacrev": lambda apply, a, x: [jacrev(lambda a: apply(a, x).pow(2))(a)],
}


@pytest.mark.parametrize("name", WAYS)
def test_transforms_have_eagers_values(name: str) -> None:
    fast = fusegrad.compile(Composable)
    for steps in (12, 15):
        a, x = torch.rand(steps, 3), torch.randn(steps, 3)
        assert torch.equal(fast.apply(a, x), Composable.apply(a, x))
        for found, expected in zip(WAYS[name](fast.apply, a, x), WAYS[name](Composable.apply, a, x), strict=True):
            torch.testing.assert_close(found, expected)


def test_a_plain_function_has_a_loop_in_its_derived_backward() -> None:
    def recurrence(a: Tensor, x: Tensor) -> Tensor:
        h, hs = torch.zeros_like(x[0]), []
        for t in range(x.shape[0]):
            h = a[t] * h + x[t].sin()
            hs.append(h)
        return torch.stack(hs)

    fast, captures = fusegrad.compile(recurrence), []
    for steps in (12, 16):
        a, x = torch.rand(steps, 3, requires_grad=True), torch.randn(steps, 3, requires_grad=True)
        before = fusegrad.stats()["captures"]
        found = torch.autograd.grad(fast(a, x).pow(2).sum(), (a, x))
        captures.append(fusegrad.stats()["captures"] - before)
        expected = torch.autograd.grad(recurrence(a, x).pow(2).sum(), (a, x))
        assert all(map(torch.equal, found, expected))
    assert captures == [2, 0]


def test_the_derived_gradient_of_what_steps_read_is_put_together_once() -> None:
    """Autograd adds up as many tensors of the size of x as there are steps, and takes `w.T` anew in each."""

    def recurrence(x: Tensor, w: Tensor, h: Tensor) -> Tensor:
        hs = []
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] @ w.T + h @ w.T)
            hs.append(h)
        return torch.stack(hs)

    fast = fusegrad.compile(recurrence)
    for steps in (12, 15):
        given = [torch.randn(*s, requires_grad=True) for s in ((steps, 3, 5), (5, 5), (3, 5))]
        found, expected = (
            torch.autograd.grad(f(*given).sin().sum(), given, allow_unused=True) for f in (fast, recurrence)
        )
        assert all(a is b or torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert fast._fusegrad.ledger.records["backward"].reason is None
    ((spec,),) = fast._fusegrad.table.by_facts.values()
    (entry,) = spec.backward.entries.values()
    scans = [v for v in graph_of(entry.trace, "backward").order() if v.prim == "scan"]
    assert scans and all(t.shape != given[0].shape for v in scans for t in v.avals[: v.params["carries"]])


def test_a_slice_from_a_size_on_is_not_the_whole_axis() -> None:
    class Halves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
            total, rest = torch.zeros_like(x[0]), []
            for t in range(x.shape[0]):
                total += x[t]
                rest.append((x[t] * 2)[:, w.shape[0] :])
            return total, torch.stack(rest)

        @staticmethod
        def backward(ctx: Any, g: Tensor, rest: Tensor) -> Any:
            return None, None

    fast = fusegrad.compile(Halves)
    for steps in (12, 15):
        x, w = torch.randn(steps, 2, 7), torch.randn(3)
        assert all(map(torch.equal, fast.apply(x, w), Halves.apply(x, w)))
    assert fast._fusegrad.ledger.records["forward"].reason is None


def test_a_plain_function_that_draws_in_a_loop_is_left_to_eager() -> None:
    """Its derived backward would run the loop again, on other numbers."""

    def drops(x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            h = torch.sin(h * torch.rand_like(h)) + x[t]
        return h

    fast, x, grads = fusegrad.compile(drops), torch.randn(12, 3, requires_grad=True), []
    with pytest.warns(fusegrad.FallbackWarning, match="random numbers"):
        fast(x)
    for function in (drops, fast):
        torch.manual_seed(0)
        grads += torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(*grads)
