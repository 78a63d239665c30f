"""Softmax with a learned sink (Xiao et al. 2023; gpt-oss): a logit a head that takes weight and gives nothing."""

import torch

import fusegrad


@fusegrad.compile
class SinkSoftmax(torch.autograd.Function):
    """exp(scores) / (sum(exp(scores)) + exp(sink)); scores [..., heads, queries, keys], sink [heads]"""

    @staticmethod
    def forward(scores, sink):
        sink = sink[:, None, None]
        highest = torch.maximum(scores.amax(-1, keepdim=True), sink)
        exp = (scores - highest).exp()
        return exp / (exp.sum(-1, keepdim=True) + (sink - highest).exp())

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad_output):
        (y,) = ctx.saved_tensors
        weighted = (grad_output * y).sum(-1, keepdim=True)
        into_sink = -(1 - y.sum(-1, keepdim=True)) * weighted  # the sink's own share is what the others leave
        return y * (grad_output - weighted), into_sink.sum_to_size(y.shape[-3], 1, 1).flatten()
