"""LayerNorm (Ba et al. 2016): mean and rstd of each row are saved; x_hat is computed again in backward."""

import torch

import fusegrad


@fusegrad.compile
class LayerNorm(torch.autograd.Function):
    """(x - mean) / std * weight + bias"""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        h = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = h.mean(-1, keepdim=True)
        rstd = torch.rsqrt((h - mean).square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return ((h - mean) * rstd * weight + bias).to(x.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        x, weight, mean, rstd = ctx.saved_tensors
        grad = grad_output.to(rstd.dtype)
        x_hat, scaled = (x - mean) * rstd, grad * weight
        along_x_hat = x_hat * (scaled * x_hat).mean(-1, keepdim=True)
        grad_x = rstd * (scaled - scaled.mean(-1, keepdim=True) - along_x_hat)
        grad_weight, grad_bias = (grad * x_hat).sum_to_size(weight.shape), grad.sum_to_size(weight.shape)
        return grad_x.to(x.dtype), grad_weight, grad_bias, None
