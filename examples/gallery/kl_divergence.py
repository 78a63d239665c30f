"""KL(target || exp(log_q)) as a mean over the rows, log_q being log-probabilities, as torch.nn.KLDivLoss has it."""

import torch

import fusegrad


@fusegrad.compile
class KLDivergence(torch.autograd.Function):
    """sum(target * (log(target) - log_q)) / rows"""

    @staticmethod
    def forward(log_q, target):
        rows = log_q.numel() // log_q.shape[-1]
        return (torch.xlogy(target, target) - target * log_q).sum() / rows

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad_output):
        (target,) = ctx.saved_tensors
        return -target * (grad_output / (target.numel() // target.shape[-1])), None
