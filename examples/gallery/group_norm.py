"""GroupNorm (Wu & He 2018) of [batch, channels, ...]: two numbers are saved for each group of each sample."""

import torch

import fusegrad


@fusegrad.compile
class GroupNorm(torch.autograd.Function):
    """(x - mean) / std * weight + bias, the statistics over a group of channels"""

    @staticmethod
    def forward(ctx, x, weight, bias, groups, eps):
        wide = torch.promote_types(x.dtype, torch.float32)
        h = x.to(wide).reshape(x.shape[0], groups, x.shape[1] // groups, -1)
        mean = h.mean((2, 3), keepdim=True)
        rstd = torch.rsqrt((h - mean).square().mean((2, 3), keepdim=True) + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        per_channel = (1, groups, -1, 1)
        y = (h - mean) * rstd * weight.reshape(per_channel) + bias.reshape(per_channel)
        return y.reshape(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        x, weight, mean, rstd = ctx.saved_tensors
        groups = mean.shape[1]
        split = (x.shape[0], groups, x.shape[1] // groups, -1)
        grad, h = (t.to(mean.dtype).reshape(split) for t in (grad_output, x))
        x_hat, scaled = (h - mean) * rstd, grad * weight.reshape(1, groups, -1, 1)
        along_x_hat = x_hat * (scaled * x_hat).mean((2, 3), keepdim=True)
        grad_x = rstd * (scaled - scaled.mean((2, 3), keepdim=True) - along_x_hat)
        grad_weight, grad_bias = (grad * x_hat).sum((0, 3)).flatten(), grad.sum((0, 3)).flatten()
        return grad_x.reshape(x.shape).to(x.dtype), grad_weight, grad_bias, None, None
