"""ReGLU (Shazeer 2020): the gate is a ReLU."""

import torch

import fusegrad


@fusegrad.compile
class ReGLU(torch.autograd.Function):
    """relu(gate) * up"""

    @staticmethod
    def forward(gate, up):
        return torch.relu(gate) * up

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad_output):
        gate, up = ctx.saved_tensors
        return torch.where(gate > 0, grad_output * up, 0), grad_output * torch.relu(gate)
