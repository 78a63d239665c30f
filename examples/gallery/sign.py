"""Binary values with the gradient of a clipped identity (Courbariaux et al. 2016)."""

import torch

import fusegrad


@fusegrad.compile
class Sign(torch.autograd.Function):
    """1 where x >= 0, else -1"""

    @staticmethod
    def forward(x):
        return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() <= 1, grad_output, 0)
