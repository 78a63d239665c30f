"""Squared ReLU (So et al. 2021, Primer)."""

import torch

import fusegrad


@fusegrad.compile
class SquaredReLU(torch.autograd.Function):
    """relu(x)^2"""

    @staticmethod
    def forward(x):
        return torch.relu(x).square()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return 2 * grad_output * torch.relu(x)
