"""Cross-entropy with ignore_index: the mean over the rows that count. Beside the inputs one number a row is saved."""

import torch
from compare import compare

import fusegrad


@fusegrad.compile
class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, ignore_index):
        counts = target != ignore_index
        lse = torch.logsumexp(logits, -1)
        picked = logits.gather(-1, torch.where(counts, target, 0).unsqueeze(-1)).squeeze(-1)
        total = counts.sum().clamp_min(1)
        ctx.save_for_backward(logits, target, lse, total)
        ctx.ignore_index = ignore_index
        return torch.where(counts, lse - picked, 0).sum() / total

    @staticmethod
    def backward(ctx, grad_output):
        logits, target, lse, total = ctx.saved_tensors
        scale = torch.where(target != ctx.ignore_index, grad_output / total, 0).unsqueeze(-1)
        hit = torch.arange(logits.shape[-1], device=logits.device) == target.unsqueeze(-1)
        return (torch.exp(logits - lse.unsqueeze(-1)) - hit.to(logits.dtype)) * scale, None, None


AsWritten = CrossEntropy.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    logits, target = torch.randn(64, 101, requires_grad=True), torch.randint(0, 101, (64,))
    target[::5] = -100
    compare("cross-entropy", AsWritten.apply, CrossEntropy.apply, logits, target, -100)


if __name__ == "__main__":
    main()
