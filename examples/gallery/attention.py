"""Softmax attention with grouped heads, causal or not, as a textbook has it: products, softmax, and their backward.

Scores and weights have queries x keys elements, and no method returns them; nothing here says how to do without them.
"""

import torch

import fusegrad


@fusegrad.compile
class Attention(torch.autograd.Function):
    """softmax(q @ k.mT * scale) @ v; q [batch, heads, queries, width]; k, v have as many heads, or one for a group"""

    @staticmethod
    def forward(ctx, q, k, v, scale, causal):
        grouped, keys, values = q.unflatten(1, (k.shape[1], -1)), k.unsqueeze(2), v.unsqueeze(2)
        scores = grouped @ keys.mT * scale
        if causal:
            key, query = (torch.arange(t.shape[2], device=q.device) for t in (k, q))
            scores = scores.masked_fill(key > query[:, None], float("-inf"))
        weights = scores.softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.scale = scale
        return (weights @ values).flatten(1, 2)

    @staticmethod
    def backward(ctx, grad_output):
        q, k, v, weights = ctx.saved_tensors
        grouped, grad = (t.unflatten(1, (k.shape[1], -1)) for t in (q, grad_output))
        keys, values = k.unsqueeze(2), v.unsqueeze(2)
        grad_weights = grad @ values.mT
        row = (weights * grad_weights).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - row) * ctx.scale
        grad_q, grad_k, grad_v = grad_scores @ keys, grad_scores.mT @ grouped, weights.mT @ grad
        return grad_q.flatten(1, 2), grad_k.sum(2), grad_v.sum(2), None, None
