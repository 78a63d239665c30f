"""Softmax over the positions that a mask admits, with the short backward that needs the output alone."""

import torch
from compare import compare

import fusegrad


@fusegrad.compile
class MaskedSoftmax(torch.autograd.Function):
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


AsWritten = MaskedSoftmax.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    scores = torch.randn(2, 4, 48, 48, requires_grad=True)
    causal = torch.ones(48, 48, dtype=torch.bool).tril()
    compare("causal softmax", AsWritten.apply, MaskedSoftmax.apply, scores, causal)


if __name__ == "__main__":
    main()
