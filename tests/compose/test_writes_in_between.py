"""A forward that writes to what it made itself: the derivatives are those of the same forward without writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import Function
from torch.func import grad, hessian, jvp, vmap

import fusegrad

Tensor = torch.Tensor


class Softmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        p = x.exp()
        p /= p.sum(-1, keepdim=True)
        ctx.save_for_backward(p)
        return p * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        return g * p


class SoftmaxWithout(Softmax):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        e = x.exp()
        p = e / e.sum(-1, keepdim=True)
        ctx.save_for_backward(p)
        return p * x


class Cubed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 7


class ThroughAView(Softmax):
    """A nested call, and a write to a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        p = Cubed.apply(x).sin()
        first = p[..., 0]
        first.mul_(x[..., 1])
        p.add_(first.unsqueeze(-1) * 1)
        ctx.save_for_backward(p)
        return p * x


class ThroughAViewWithout(Softmax):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        p = Cubed.apply(x).sin()
        first = p[..., :1] * x[..., 1:2]
        p = torch.cat([first, p[..., 1:]], -1) + first
        ctx.save_for_backward(p)
        return p * x


PAIRS = {"softmax": (Softmax, SoftmaxWithout), "through a view": (ThroughAView, ThroughAViewWithout)}
COMPOSED = {
    "hessian": lambda f, x: hessian(lambda t: f(t).sin().sum())(x),
    "jvp of grad": lambda f, x: jvp(grad(lambda t: f(t).sin().sum()), (x,), (x.cos(),)),
    "vmap grad grad": lambda f, x: vmap(grad(lambda t: grad(lambda s: f(s).sum())(t).sin().sum()))(x),
    "grad vmap": lambda f, x: grad(lambda t: grad(lambda s: vmap(f)(s).sum())(t).sin().sum())(x),
}


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("composition", COMPOSED)
@pytest.mark.parametrize("pair", PAIRS)
def test_writes_in_between(pair: str, composition: str, backend: str) -> None:
    x = torch.linspace(-1, 2, 6, dtype=torch.float64).reshape(2, 3)
    ours, right = (COMPOSED[composition](fusegrad.compile(c, backend=backend).apply, x) for c in PAIRS[pair])
    torch.testing.assert_close(ours, right)
