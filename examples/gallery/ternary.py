"""Weights of -1, 0 and 1 times their mean magnitude (BitNet b1.58, Ma et al. 2024), straight-through."""

import torch

import fusegrad


@fusegrad.compile
class Ternary(torch.autograd.Function):
    """clamp(round(w / mean|w|), -1, 1) * mean|w|"""

    @staticmethod
    def forward(weight):
        scale = weight.abs().mean().clamp_min(1e-5)
        return (weight / scale).round().clamp(-1, 1) * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output.clone()
