"""Gradient reversal for domain adaptation (Ganin & Lempitsky 2015): the identity, whose gradient is turned round."""

import torch

import fusegrad


@fusegrad.compile
class GradientReversal(torch.autograd.Function):
    """x, with the gradient times -strength"""

    @staticmethod
    def forward(x, strength):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.strength = inputs[1]

    @staticmethod
    def backward(ctx, grad_output):
        return -ctx.strength * grad_output, None
