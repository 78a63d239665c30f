"""A straight-through quantiser (Bengio et al. 2013): rounds forward; gradients pass where nothing was clipped.

Autograd of the same forward gives zero everywhere. The backward that is written here is the one that runs.
"""

import torch
from compare import compare
from gallery.straight_through import Quantize

AsWritten = Quantize.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    x = torch.randn(48, 257, requires_grad=True)
    compare("straight-through, 4 bits", AsWritten.apply, Quantize.apply, x, 0.25, 4)


if __name__ == "__main__":
    main()
