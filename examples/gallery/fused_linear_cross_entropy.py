"""Cross-entropy of x @ weight.T, written plainly: the logits are made where they are used, in both methods.

Saved are the inputs and one number a row; backward makes the logits again: one more matrix product than keeping them.
Compiled, no more of them is in memory at once than `slab_bytes` (256 MiB): what would be more is computed a slab of
rows, or of classes, at a time.
"""

import torch

import fusegrad


@fusegrad.compile
class FusedLinearCrossEntropy(torch.autograd.Function):
    """Mean over the rows that count of lse(x @ weight.T) - (x @ weight.T)[target]"""

    @staticmethod
    def forward(ctx, x, weight, target, ignore_index):
        logits = (x @ weight.mT).to(torch.promote_types(x.dtype, torch.float32))
        counts = target != ignore_index
        count = counts.sum().clamp_min(1)
        sums = torch.logsumexp(logits, -1)
        picked = logits.gather(-1, torch.where(counts, target, 0).unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(x, weight, target, sums, count)
        ctx.ignore_index = ignore_index
        return torch.where(counts, sums - picked, 0).sum() / count

    @staticmethod
    def backward(ctx, grad_output):
        x, weight, target, sums, count = ctx.saved_tensors
        scale = torch.where(target != ctx.ignore_index, grad_output / count, 0).unsqueeze(-1)
        hit = torch.arange(weight.shape[0], device=x.device) == target.unsqueeze(-1)
        grad = ((torch.exp(x @ weight.mT - sums.unsqueeze(-1)) - hit.to(sums.dtype)) * scale).to(x.dtype)
        return grad @ weight, grad.mT @ x, None, None
