"""The Jensen-Shannon divergence of two rows of log-probabilities, for distillation (Agarwal et al. 2024)."""

import math

import torch

import fusegrad


def log_mixture(x, y, beta):
    return torch.logaddexp(x + math.log(1 - beta), y + math.log(beta))


@fusegrad.compile
class JSDivergence(torch.autograd.Function):
    """Mean over rows of beta * KL(e^y || m) + (1 - beta) * KL(e^x || m), m = beta * e^y + (1 - beta) * e^x"""

    @staticmethod
    def forward(x, y, beta):
        log_m = log_mixture(x, y, beta)
        total = beta * y.exp() * (y - log_m) + (1 - beta) * x.exp() * (x - log_m)
        return total.sum() / (x.numel() // x.shape[-1])

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, y, ctx.beta = inputs
        ctx.save_for_backward(x, y)

    @staticmethod
    def backward(ctx, grad_output):
        x, y = ctx.saved_tensors
        log_m, scale = log_mixture(x, y, ctx.beta), grad_output / (x.numel() // x.shape[-1])
        return (1 - ctx.beta) * x.exp() * (x - log_m) * scale, ctx.beta * y.exp() * (y - log_m) * scale, None
