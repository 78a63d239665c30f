"""1.5-entmax (Peters et al. 2019), between softmax and sparsemax, solved exactly by sorting."""

import torch

import fusegrad


@fusegrad.compile
class Entmax15(torch.autograd.Function):
    """max(x / 2 - tau, 0)^2 with the tau for which the rows sum to one"""

    @staticmethod
    def forward(x):
        h = (x - x.amax(-1, keepdim=True)) / 2
        z = torch.sort(h, dim=-1, descending=True).values
        k = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
        mean, square = z.cumsum(-1) / k, z.square().cumsum(-1) / k
        spread = (1 - k * (square - mean * mean)) / k
        tau = mean - torch.sqrt(torch.clamp_min(spread, 0))
        count = (tau <= z).sum(-1, keepdim=True)
        return torch.clamp_min(h - tau.gather(-1, count - 1), 0).square()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad_output):
        s = torch.sqrt(ctx.saved_tensors[0])
        mean = (grad_output * s).sum(-1, keepdim=True) / s.sum(-1, keepdim=True)
        return s * (grad_output - mean)
