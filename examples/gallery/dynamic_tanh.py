"""Dynamic tanh (Zhu et al. 2025), a norm without statistics: tanh(alpha * x) * weight + bias."""

import torch

import fusegrad


@fusegrad.compile
class DynamicTanh(torch.autograd.Function):
    """tanh(alpha * x) * weight + bias, alpha being one number"""

    @staticmethod
    def forward(x, alpha, weight, bias):
        h = x.to(torch.promote_types(x.dtype, torch.float32))
        return (torch.tanh(alpha * h) * weight + bias).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, alpha, weight, _ = inputs
        ctx.save_for_backward(x, alpha, weight)

    @staticmethod
    def backward(ctx, grad_output):
        x, alpha, weight = ctx.saved_tensors
        h, grad = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (x, grad_output))
        t = torch.tanh(alpha * h)
        inner = grad * weight * (1 - t * t)
        grad_weight, grad_bias = (grad * t).sum_to_size(weight.shape), grad.sum_to_size(weight.shape)
        return (inner * alpha).to(x.dtype), (inner * h).sum_to_size(alpha.shape), grad_weight, grad_bias
