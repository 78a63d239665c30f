"""RMSNorm (Zhang & Sennrich 2019), statistics in float32: rstd is saved, one number a row; x_hat is made again."""

import torch

import fusegrad


@fusegrad.compile
class RMSNorm(torch.autograd.Function):
    """x / rms(x) * weight"""

    @staticmethod
    def forward(ctx, x, weight, eps):
        h = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (h * rstd * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        x, weight, rstd = ctx.saved_tensors
        grad = grad_output.to(rstd.dtype)
        x_hat, scaled = x * rstd, grad * weight
        grad_x = rstd * (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), (grad * x_hat).sum_to_size(weight.shape), None
