"""Residual add and RMSNorm in one Function: returns the normalised sum, and the sum for the next block."""

import torch

import fusegrad


@fusegrad.compile
class AddRMSNorm(torch.autograd.Function):
    """(rms_norm(x + residual) * weight, x + residual)"""

    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        total = x + residual
        h = total.to(torch.promote_types(total.dtype, torch.float32))
        rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(total, weight, rstd)
        return (h * rstd * weight).to(x.dtype), total

    @staticmethod
    def backward(ctx, grad_normed, grad_total):
        total, weight, rstd = ctx.saved_tensors
        grad = grad_normed.to(rstd.dtype)
        x_hat, scaled = total * rstd, grad * weight
        grad_norm = rstd * (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True))
        grad_sum = (grad_norm + grad_total).to(total.dtype)
        return grad_sum, grad_sum, (grad * x_hat).sum_to_size(weight.shape), None
