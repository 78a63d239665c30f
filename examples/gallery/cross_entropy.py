"""Cross-entropy with ignore_index, label smoothing (Szegedy et al. 2016) and z-loss (Chowdhery et al. 2022).

Beside the inputs one number a row is saved, the log-sum-exp; the softmax is made from it in backward.
"""

import torch

import fusegrad


@fusegrad.compile
class CrossEntropy(torch.autograd.Function):
    """Mean over the rows that count of lse - (1 - s) * logits[target] - s * mean(logits) + z * lse^2"""

    @staticmethod
    def forward(ctx, logits, target, ignore_index, smoothing, z_loss):
        x = logits.to(torch.promote_types(logits.dtype, torch.float32))
        counts = target != ignore_index
        total = counts.sum().clamp_min(1)
        lse = torch.logsumexp(x, -1)
        picked = x.gather(-1, torch.where(counts, target, 0).unsqueeze(-1)).squeeze(-1)
        row = lse - (1 - smoothing) * picked - smoothing * x.mean(-1) + z_loss * lse.square()
        ctx.save_for_backward(logits, target, lse, total)
        ctx.ignore_index, ctx.smoothing, ctx.z_loss = ignore_index, smoothing, z_loss
        return torch.where(counts, row, 0).sum() / total

    @staticmethod
    def backward(ctx, grad_output):
        logits, target, lse, total = ctx.saved_tensors
        lse, classes = lse.unsqueeze(-1), logits.shape[-1]
        scale = torch.where(target != ctx.ignore_index, grad_output / total, 0).unsqueeze(-1)
        hit = (torch.arange(classes, device=logits.device) == target.unsqueeze(-1)).to(lse.dtype)
        p = torch.exp(logits - lse)
        grad = p * (1 + 2 * ctx.z_loss * lse) - (1 - ctx.smoothing) * hit - ctx.smoothing / classes
        return (grad * scale).to(logits.dtype), None, None, None, None
