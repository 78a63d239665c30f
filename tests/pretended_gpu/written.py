"""Functions that the scenes compile: written by hand, so that every method is as plain as can be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def gated(scale: float = 1.0) -> type:
    """A class of its own each time: nothing of it was captured yet."""

    class Gated(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            s = torch.sigmoid(x * scale)
            ctx.save_for_backward(x, w)
            return x * s * w

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, w = ctx.saved_tensors
            s = torch.sigmoid(x * scale)
            return g * w * s * (1 + scale * x * (1 - s)), (g * x * s).sum(0)

    return Gated


class Norm(Function):
    """In the style that torch.func takes."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return x * r * w, r

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        x, w, r = ctx.saved_tensors
        xhat, scaled = x * r, g * w
        return r * (scaled - xhat * (scaled * xhat).mean(-1, keepdim=True)), (g * xhat).sum(0)


def norm_by_hand(x: Tensor, w: Tensor) -> Tensor:
    """What Norm returns, differentiable by torch."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w


class BiasResidual(Function):
    """A product of which both operands are in memory, and what is made of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, b)
        return torch.relu(x @ w.mT + b) + r

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, b = ctx.saved_tensors
        kept = torch.where(x @ w.mT + b > 0, g, 0.0)
        return kept @ w, kept.mT @ x, kept.sum(0), g


class LargestFirst(Function):
    """Asks what is in a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.largest = x.abs().max().item()
        ctx.save_for_backward(x)
        return torch.sigmoid(x) * x / ctx.largest

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.sigmoid(g) / ctx.largest + x * 0


def pair(device: str = "cuda", dtype: Any = torch.float32, rows: int = 16, width: int = 32) -> tuple[Tensor, Tensor]:
    """A matrix and a row for it, as leaves."""
    numbers = torch.Generator().manual_seed(rows * width)
    x, w = (torch.randn(s, generator=numbers, dtype=torch.float64) for s in ((rows, width), (width,)))
    return x.to(device, dtype).requires_grad_(), w.to(device, dtype).requires_grad_()


def gradients(y: Any, *leaves: Tensor) -> list[Tensor]:
    """y and its gradients for ones."""
    first = y[0] if isinstance(y, tuple) else y
    return [first, *torch.autograd.grad(first, leaves, torch.ones_like(first))]
