"""InfoNCE (van den Oord et al. 2018) in both directions, as in CLIP (Radford et al. 2021): a pair against all others.

The similarities of all pairs are batch x batch, and neither method returns them.
"""

import torch

import fusegrad


@fusegrad.compile
class InfoNCE(torch.autograd.Function):
    """Mean cross-entropy of a @ b.mT / temperature by rows and columns, pairs on the diagonal; a, b [batch, width]"""

    @staticmethod
    def forward(ctx, a, b, temperature):
        scores = a @ b.mT / temperature
        pairs = (a * b).sum(-1) / temperature
        ctx.save_for_backward(a, b)
        ctx.temperature = temperature
        return (scores.logsumexp(1) + scores.logsumexp(0) - 2 * pairs).mean() / 2

    @staticmethod
    def backward(ctx, grad_output):
        a, b = ctx.saved_tensors
        scores = a @ b.mT / ctx.temperature
        pairs = torch.eye(a.shape[0], device=a.device, dtype=a.dtype)
        grad_scores = (scores.softmax(1) + scores.softmax(0) - 2 * pairs) * (grad_output / (2 * a.shape[0]))
        return grad_scores @ b / ctx.temperature, grad_scores.mT @ a / ctx.temperature, None
