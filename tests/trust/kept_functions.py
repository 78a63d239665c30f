"""Functions whose captures are kept on disk, for runs that damage the cache. Their backwards are no derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import Function

Tensor = torch.Tensor


class Gate(Function):
    """y * sigmoid(x), with a backward that is wrong on purpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        ctx.save_for_backward(x, y, gate)
        return gate * y + 0.25

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y, gate = ctx.saved_tensors
        return grad * y * gate * 3.0, grad * gate + x


class Norm(Function):
    """Rows over their root mean square, with a backward that is wrong on purpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, y, scale)
        return x * scale * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y, scale = ctx.saved_tensors
        return grad * y * scale, (grad * x * scale).sum(-1, keepdim=True) * y


CLASSES = (Gate, Norm)


def operands() -> list[Tensor]:
    """Two tensors of 5 by 8 that ask for gradients."""
    return [torch.linspace(low, 2.0, 40).reshape(5, 8).requires_grad_() for low in (-2.0, -1.0)]


def results(cls: Any) -> list[Tensor]:
    """Output and gradients."""
    given = operands()
    output = cls.apply(*given)
    return [output.detach(), *torch.autograd.grad(output, given, torch.linspace(-1.0, 1.0, 40).reshape(5, 8))]
