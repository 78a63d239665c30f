"""Focal loss for yes-or-no targets (Lin et al. 2017): easy examples count less, by (1 - p)^gamma."""

import torch
import torch.nn.functional as F

import fusegrad


@fusegrad.compile
class FocalLoss(torch.autograd.Function):
    """Mean of -weight * (1 - p)^gamma * log(p), p being the probability of the right answer"""

    @staticmethod
    def forward(logits, target, alpha, gamma):
        signed = torch.where(target, logits, -logits)  # the logit of the right answer
        weight = torch.where(target, alpha, 1 - alpha)
        return (-weight * torch.sigmoid(-signed) ** gamma * F.logsigmoid(signed)).mean()

    @staticmethod
    def setup_context(ctx, inputs, output):
        logits, target, ctx.alpha, ctx.gamma = inputs
        ctx.save_for_backward(logits, target)

    @staticmethod
    def backward(ctx, grad_output):
        logits, target = ctx.saved_tensors
        sign = torch.where(target, 1.0, -1.0).to(logits.dtype)
        p, log_p = torch.sigmoid(sign * logits), F.logsigmoid(sign * logits)
        weight = torch.where(target, ctx.alpha, 1 - ctx.alpha)
        slope = weight * (1 - p) ** ctx.gamma * (ctx.gamma * p * log_p - (1 - p))
        return grad_output * sign * slope / logits.numel(), None, None, None
