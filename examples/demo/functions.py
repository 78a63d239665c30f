"""The custom Functions of the demo's language model, as their author would write them in plain PyTorch, in both styles.

Each backward is the short one that a kernel author would derive by hand. Nothing here knows about fusegrad.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class RMSNorm(Function):
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension (Zhang & Sennrich 2019)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        x_hat = x * rstd
        scaled = grad_output * weight
        grad_x = rstd * (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True))
        return grad_x, (grad_output * x_hat).sum(0), None


class CausalSoftmax(Function):
    """softmax(scores * scale) over the positions up to and including the query's own."""

    @staticmethod
    def forward(scores: Tensor, scale: float) -> Tensor:
        queries, keys = scores.shape[-2:]
        later = torch.arange(keys, device=scores.device) > torch.arange(queries, device=scores.device).unsqueeze(-1)
        scaled = (scores * scale).masked_fill(later, float("-inf"))
        exp = (scaled - scaled.amax(-1, keepdim=True)).exp()
        return exp / exp.sum(-1, keepdim=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        _, ctx.scale = inputs
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        weighted = grad_output * y
        return (weighted - y * weighted.sum(-1, keepdim=True)) * ctx.scale, None


class SwiGLU(Function):
    """silu(gate) * up (Shazeer 2020); backward computes the sigmoid again instead of saving it."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return gate * torch.sigmoid(gate) * up

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        return grad_output * up * slope, grad_output * gate * sigmoid


class CrossEntropy(Function):
    """Mean of logsumexp(logits) - logits[target] over the rows whose target is not `ignore_index`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        valid = target != ignore_index
        picked = logits.gather(-1, torch.where(valid, target, 0).unsqueeze(-1)).squeeze(-1)
        largest = logits.amax(-1)
        lse = (logits - largest.unsqueeze(-1)).exp().sum(-1).log() + largest
        count = valid.sum()
        ctx.ignore_index = ignore_index
        ctx.save_for_backward(logits, target, lse, count)
        return torch.where(valid, lse - picked, 0.0).sum() / count

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        logits, target, lse, count = ctx.saved_tensors
        classes = torch.arange(logits.shape[-1], device=logits.device)
        hit = (classes == target.unsqueeze(-1)).to(logits.dtype)
        weight = torch.where(target != ctx.ignore_index, grad_output / count, 0.0).unsqueeze(-1)
        return ((logits - lse.unsqueeze(-1)).exp() - hit) * weight, None, None


FUNCTIONS: tuple[type[Function], ...] = (RMSNorm, CausalSoftmax, SwiGLU, CrossEntropy)
