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
