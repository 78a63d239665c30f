"""Rotary position embedding (Su et al. 2021), halves rotated: backward is the rotation by the opposite angle."""

import torch

import fusegrad


def rotate(x, cos, sin):
    """The two halves of the last dimension as the coordinates of points in a plane."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@fusegrad.compile
class RoPE(torch.autograd.Function):
    """x turned by the angles of its position; cos and sin have half of its width"""

    @staticmethod
    def forward(x, cos, sin):
        return rotate(x, cos, sin)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx, grad_output):
        cos, sin = ctx.saved_tensors
        return rotate(grad_output, cos, -sin), None, None


def angles(length, width, base=10_000.0):
    """cos and sin of every position, [length, width / 2]."""
    frequency = base ** (-torch.arange(0, width, 2) / width)
    turned = torch.outer(torch.arange(length), frequency)
    return turned.cos(), turned.sin()
