"""Cross-entropy of x @ weight.T a few rows at a time, so that the logits never exist as a whole.

Saved are the inputs and one number a row; backward makes the logits of each chunk again: one more matrix product than
keeping them, and no more memory than one chunk of them.
"""

import torch

import fusegrad


@fusegrad.compile
class FusedLinearCrossEntropy(torch.autograd.Function):
    """Mean over the rows that count of lse(x @ weight.T) - (x @ weight.T)[target]"""

    @staticmethod
    def forward(ctx, x, weight, target, ignore_index, chunks):
        wide = torch.promote_types(x.dtype, torch.float32)
        sums, total = [], torch.zeros((), dtype=wide, device=x.device)
        for rows, labels in zip(x.chunk(chunks), target.chunk(chunks), strict=True):
            logits, counts = (rows @ weight.mT).to(wide), labels != ignore_index
            picked = logits.gather(-1, torch.where(counts, labels, 0).unsqueeze(-1)).squeeze(-1)
            sums.append(torch.logsumexp(logits, -1))
            total = total + torch.where(counts, sums[-1] - picked, 0).sum()
        count = (target != ignore_index).sum().clamp_min(1)
        ctx.save_for_backward(x, weight, target, torch.cat(sums), count)
        ctx.ignore_index, ctx.chunks = ignore_index, chunks
        return total / count

    @staticmethod
    def backward(ctx, grad_output):
        x, weight, target, lse, count = ctx.saved_tensors
        classes = torch.arange(weight.shape[0], device=x.device)
        grads, grad_weight = [], torch.zeros_like(weight, dtype=lse.dtype)
        for rows, labels, sums in zip(*(t.chunk(ctx.chunks) for t in (x, target, lse)), strict=True):
            scale = torch.where(labels != ctx.ignore_index, grad_output / count, 0).unsqueeze(-1)
            hit = (classes == labels.unsqueeze(-1)).to(lse.dtype)
            grad = ((torch.exp(rows @ weight.mT - sums.unsqueeze(-1)) - hit) * scale).to(x.dtype)
            grads.append(grad @ weight)
            grad_weight = grad_weight + grad.mT @ rows
        return torch.cat(grads), grad_weight.to(weight.dtype), None, None, None
