"""The clipped policy loss of PPO (Schulman et al. 2017) and GRPO: no gradient where the ratio was clipped."""

import torch

import fusegrad


@fusegrad.compile
class ClippedPolicyLoss(torch.autograd.Function):
    """Mean over the mask of -min(ratio * advantage, clamp(ratio) * advantage), ratio = exp(log_p - old_log_p)"""

    @staticmethod
    def forward(ctx, log_p, old_log_p, advantage, mask, low, high):
        ratio, count = torch.exp(log_p - old_log_p), mask.sum().clamp_min(1)
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        ctx.save_for_backward(log_p, old_log_p, advantage, mask, count)
        ctx.low, ctx.high = low, high
        return -torch.where(mask, gain, 0).sum() / count

    @staticmethod
    def backward(ctx, grad_output):
        log_p, old_log_p, advantage, mask, count = ctx.saved_tensors
        ratio = torch.exp(log_p - old_log_p)
        clipped = torch.where(advantage > 0, ratio > 1 + ctx.high, ratio < 1 - ctx.low)
        return torch.where(mask & ~clipped, -ratio * advantage * (grad_output / count), 0), None, None, None, None, None
