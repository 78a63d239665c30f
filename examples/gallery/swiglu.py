"""SwiGLU (Shazeer 2020): backward computes the sigmoid again, so that only the two inputs are saved."""

import torch

import fusegrad


@fusegrad.compile
class SwiGLU(torch.autograd.Function):
    """silu(gate) * up"""

    @staticmethod
    def forward(gate, up):
        return gate * torch.sigmoid(gate) * up

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad_output):
        gate, up = ctx.saved_tensors
        s = torch.sigmoid(gate)
        return grad_output * up * s * (1 + gate * (1 - s)), grad_output * gate * s
