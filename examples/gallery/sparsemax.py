"""Sparsemax (Martins & Astudillo 2016): the nearest point of the simplex. Only the output is saved."""

import torch

import fusegrad


@fusegrad.compile
class Sparsemax(torch.autograd.Function):
    """max(x - tau, 0) with the tau for which the rows sum to one"""

    @staticmethod
    def forward(x):
        z = torch.sort(x, dim=-1, descending=True).values
        k = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
        excess = z.cumsum(-1) - 1
        count = (k * z > excess).sum(-1, keepdim=True)
        tau = excess.gather(-1, count - 1) / count.to(x.dtype)
        return torch.clamp_min(x - tau, 0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad_output):
        (y,) = ctx.saved_tensors
        inside = (y > 0).to(y.dtype)
        mean = (grad_output * inside).sum(-1, keepdim=True) / inside.sum(-1, keepdim=True)
        return inside * (grad_output - mean)
