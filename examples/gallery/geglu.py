"""GeGLU (Shazeer 2020) with the tanh form of GELU: backward computes the tanh again, only the inputs are saved."""

import math

import torch

import fusegrad

ROOT, CUBIC = math.sqrt(2 / math.pi), 0.044715


def inner_tanh(gate):
    return torch.tanh(ROOT * (gate + CUBIC * gate * gate * gate))


@fusegrad.compile
class GeGLU(torch.autograd.Function):
    """gelu(gate) * up"""

    @staticmethod
    def forward(gate, up):
        return 0.5 * gate * (1 + inner_tanh(gate)) * up

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad_output):
        gate, up = ctx.saved_tensors
        t = inner_tanh(gate)
        slope = 0.5 * (1 + t) + 0.5 * gate * (1 - t * t) * ROOT * (1 + 3 * CUBIC * gate * gate)
        return grad_output * up * slope, grad_output * 0.5 * gate * (1 + t)
