"""Softmax over the positions that a mask admits, with the short backward that needs the output alone."""

import torch

import fusegrad


@fusegrad.compile
class MaskedSoftmax(torch.autograd.Function):
    """softmax of the scores where the mask is true, zero elsewhere"""

    @staticmethod
    def forward(scores, mask):
        scores = scores.masked_fill(~mask, float("-inf"))
        exp = (scores - scores.amax(-1, keepdim=True)).exp()
        return exp / exp.sum(-1, keepdim=True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad_output):
        (y,) = ctx.saved_tensors
        weighted = grad_output * y
        return weighted - y * weighted.sum(-1, keepdim=True), None
