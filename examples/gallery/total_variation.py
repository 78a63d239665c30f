"""The total variation distance of two rows of probabilities, as a mean over the rows."""

import torch

import fusegrad


@fusegrad.compile
class TotalVariation(torch.autograd.Function):
    """0.5 * sum(|p - q|) / rows"""

    @staticmethod
    def forward(p, q):
        return 0.5 * (p - q).abs().sum() / (p.numel() // p.shape[-1])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad_output):
        p, q = ctx.saved_tensors
        grad = 0.5 * torch.sign(p - q) * (grad_output / (p.numel() // p.shape[-1]))
        return grad, -grad
