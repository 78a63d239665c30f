"""SwiGLU (Shazeer 2020): backward computes the sigmoid again, so that only the two inputs are saved."""

import torch
from compare import compare
from gallery.swiglu import SwiGLU

AsWritten = SwiGLU.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    gate, up = (torch.randn(48, 257, requires_grad=True) for _ in range(2))
    compare("SwiGLU", AsWritten.apply, SwiGLU.apply, gate, up)


if __name__ == "__main__":
    main()
