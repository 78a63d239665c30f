"""Soft ranks by pairs (Qin et al. 2010): a sigmoid for each comparison, made again in backward."""

import torch

import fusegrad


def compared(x, tau):
    """[..., i, j]: how far x_j is above x_i, between 0 and 1."""
    return torch.sigmoid((x.unsqueeze(-2) - x.unsqueeze(-1)) / tau)


@fusegrad.compile
class SoftRank(torch.autograd.Function):
    """0.5 + sum over j of sigmoid((x_j - x_i) / tau): 1 for the largest as tau goes to zero"""

    @staticmethod
    def forward(x, tau):
        return 0.5 + compared(x, tau).sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.tau = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        s = compared(x, ctx.tau)
        slope = s * (1 - s) / ctx.tau  # symmetric in i and j
        return ((grad_output.unsqueeze(-1) - grad_output.unsqueeze(-2)) * slope).sum(-2), None
