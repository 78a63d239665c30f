"""Lanes outside of a block, and what is made before what: neither may reach a sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fusegrad

Tensor = torch.Tensor
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def divided_rows(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Beyond the end 0 / 0 is in the operand of one product, and multiplied with p in another."""
    a, b = (x / x.norm(dim=1, keepdim=True) for x in (q, k))
    return torch.softmax(a @ b.T, -1) @ (k / w)


def divided_depths(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """11 columns are 16 lanes of a product, five of which divide by nothing."""
    return torch.softmax(q @ k.T, -1) @ (k / w).exp()


def summed_depths(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """A row's sum, and its extreme, of what is one, or less than zero, in each column."""
    return torch.sigmoid(q @ k.T - q.exp().sum(1)[:, None] - (k / w - 3).amax(1)).sum(1)


def sums_of_sums(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """What a walk stores is summed by rows, for something else that the same walk would store."""
    return torch.softmax(q @ k.T, -1) @ (1 / k.abs().sum(1, keepdim=True) * k * w)


def quotients_beside_powers(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Where a power is nothing beyond the end, a product of quotients is NaN."""
    near = torch.where((q @ k.T).abs() < 2, q @ (k * w / k.square().sum(1)[:, None]).T, 0.0)
    return (near * torch.exp(q @ k.T)).sum(1)


def weighed(x: Tensor) -> Tensor:
    return (x * torch.linspace(-1, 1.5, x.numel(), dtype=x.dtype).view(x.shape)).sum()


def gradients(f: Function, arguments: list[Tensor]) -> list[Tensor]:
    """The result, and gradients of a sum that weighs it."""
    arguments = [a.detach().requires_grad_() for a in arguments]
    out = f(*arguments)
    return [out.detach(), *torch.autograd.grad(weighed(out).square(), arguments)]


FUNCTIONS = {
    f.__name__: f
    for f in (divided_rows, divided_depths, summed_depths, quotients_beside_powers, sums_of_sums)
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_lanes_outside_reach_no_sum(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    arguments = [torch.randn(n, 11, generator=generator) / 2 for n in (37, 21)]
    arguments.append(torch.rand(11, generator=generator) + 0.5)
    found = gradients(fusegrad.compile(FUNCTIONS[name], backend="interpret", fullgraph=True), arguments)
    exact = gradients(FUNCTIONS[name], [a.double() for a in arguments])
    for f, e in zip(found, exact, strict=True):
        torch.testing.assert_close(f.double(), e, rtol=1e-4, atol=1e-4 * float(e.abs().max()))
