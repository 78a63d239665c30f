"""The hard one-hot choice of the straight-through Gumbel softmax (Jang et al. 2017); the noise is an argument."""

import torch

import fusegrad


@fusegrad.compile
class HardChoice(torch.autograd.Function):
    """one_hot(argmax(logits + noise)), with the gradient of softmax((logits + noise) / tau)"""

    @staticmethod
    def forward(logits, noise, tau):
        best = (logits + noise).argmax(-1, keepdim=True)
        return (torch.arange(logits.shape[-1], device=logits.device) == best).to(logits.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        logits, noise, ctx.tau = inputs
        ctx.save_for_backward(logits, noise)

    @staticmethod
    def backward(ctx, grad_output):
        logits, noise = ctx.saved_tensors
        y = torch.softmax((logits + noise) / ctx.tau, -1)
        weighted = grad_output * y
        return (weighted - y * weighted.sum(-1, keepdim=True)) / ctx.tau, None, None
