"""A quantiser with a learned step (LSQ, Esser et al. 2020): rounding is straight-through, the step's gradient scaled.

Autograd would say that rounding has no slope. The backward says otherwise, and forward mode follows the backward.
"""

import math

import torch

import fusegrad


@fusegrad.compile
class LearnedStep(torch.autograd.Function):
    """clamp(round(weight / step)) * step in `bits` bits"""

    @staticmethod
    def forward(weight, step, bits):
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        return (weight / step).round().clamp(low, high) * step

    @staticmethod
    def setup_context(ctx, inputs, output):
        weight, step, bits = inputs
        ctx.save_for_backward(weight, step)
        ctx.range = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    @staticmethod
    def backward(ctx, grad_output):
        weight, step = ctx.saved_tensors
        low, high = ctx.range
        q = weight / step
        inside = (q > low) & (q < high)
        by_step = torch.where(inside, q.round() - q, q.clamp(low, high))
        scale = 1 / math.sqrt(q.numel() * high)
        return grad_output * inside, (grad_output * by_step).sum() * scale, None
