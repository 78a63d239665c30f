"""Softmax over the positions that a mask admits, with the short backward that needs the output alone."""

import torch
from compare import compare
from gallery.masked_softmax import MaskedSoftmax

AsWritten = MaskedSoftmax.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    scores = torch.randn(2, 4, 48, 48, requires_grad=True)
    causal = torch.ones(48, 48, dtype=torch.bool).tril()
    compare("causal softmax", AsWritten.apply, MaskedSoftmax.apply, scores, causal)


if __name__ == "__main__":
    main()
