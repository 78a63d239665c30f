"""The clipped policy loss of PPO (Schulman et al. 2017) and GRPO: no gradient where the ratio was clipped."""

import torch

import fusegrad


@fusegrad.compile
class ClippedPolicyLoss(torch.autograd.Function):
    """Mean over the mask of -min(ratio * advantage, clamp(ratio) * advantage), ratio = exp(log_p - old_log_p)"""

    @staticmethod
    def forward(log_p, old_log_p, advantage, mask, low, high):
        ratio = torch.exp(log_p - old_log_p)
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        return -torch.where(mask, gain, 0).sum() / mask.sum().clamp_min(1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        log_p, old_log_p, advantage, mask, ctx.low, ctx.high = inputs
        ctx.save_for_backward(log_p, old_log_p, advantage, mask)

    @staticmethod
    def backward(ctx, grad_output):
        log_p, old_log_p, advantage, mask = ctx.saved_tensors
        ratio = torch.exp(log_p - old_log_p)
        clipped = torch.where(advantage > 0, ratio > 1 + ctx.high, ratio < 1 - ctx.low)
        scale = grad_output / mask.sum().clamp_min(1)
        return torch.where(mask & ~clipped, -ratio * advantage * scale, 0), None, None, None, None, None
