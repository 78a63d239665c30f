"""The Tversky loss (Salehi et al. 2017) of masks from logits; alpha = beta = 0.5 is the Dice loss."""

import torch

import fusegrad


def overlaps(p, target, alpha, beta):
    """What was found, and the weighted union, one number a sample."""
    found = (p * target).sum(-1, keepdim=True)
    return found, (1 - alpha - beta) * found + alpha * p.sum(-1, keepdim=True) + beta * target.sum(-1, keepdim=True)


@fusegrad.compile
class TverskyLoss(torch.autograd.Function):
    """Mean over samples of 1 - (TP + smooth) / (TP + alpha * FP + beta * FN + smooth)"""

    @staticmethod
    def forward(logits, target, alpha, beta, smooth):
        found, union = overlaps(torch.sigmoid(logits), target, alpha, beta)
        return (1 - (found + smooth) / (union + smooth)).mean()

    @staticmethod
    def setup_context(ctx, inputs, output):
        logits, target, *ctx.numbers = inputs
        ctx.save_for_backward(logits, target)

    @staticmethod
    def backward(ctx, grad_output):
        logits, target = ctx.saved_tensors
        alpha, beta, smooth = ctx.numbers
        p = torch.sigmoid(logits)
        found, union = overlaps(p, target, alpha, beta)
        found, union = found + smooth, union + smooth
        slope = (target * union - found * ((1 - alpha - beta) * target + alpha)) / (union * union)
        return -grad_output / found.numel() * slope * p * (1 - p), None, None, None, None
