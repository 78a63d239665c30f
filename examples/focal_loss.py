"""Focal loss for yes-or-no targets (Lin et al. 2017): easy examples count less, by (1 - p)^gamma."""

import torch
import torch.nn.functional as F
from compare import compare

import fusegrad


@fusegrad.compile
class FocalLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, alpha, gamma):
        ctx.save_for_backward(logits, target)
        ctx.alpha, ctx.gamma = alpha, gamma
        signed = torch.where(target, logits, -logits)  # the logit of the right answer
        weight = torch.where(target, alpha, 1 - alpha)
        return (-weight * torch.sigmoid(-signed) ** gamma * F.logsigmoid(signed)).mean()

    @staticmethod
    def backward(ctx, grad_output):
        logits, target = ctx.saved_tensors
        sign = torch.where(target, 1.0, -1.0).to(logits.dtype)
        p, log_p = torch.sigmoid(sign * logits), F.logsigmoid(sign * logits)
        weight = torch.where(target, ctx.alpha, 1 - ctx.alpha)
        slope = weight * (1 - p) ** ctx.gamma * (ctx.gamma * p * log_p - (1 - p))
        return grad_output * sign * slope / logits.numel(), None, None, None


AsWritten = FocalLoss.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    logits, target = torch.randn(48, 80, requires_grad=True), torch.rand(48, 80) < 0.1
    compare("focal loss", AsWritten.apply, FocalLoss.apply, logits, target, 0.25, 2.0)


if __name__ == "__main__":
    main()
