"""Rotary position embedding (Su et al. 2021), halves rotated: backward is the rotation by the opposite angle."""

import torch
from compare import compare
from gallery.rope import RoPE, angles

AsWritten = RoPE.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 40, 64, requires_grad=True)  # batch, heads, positions, width of a head
    compare("RoPE", AsWritten.apply, RoPE.apply, x, *angles(40, 64))


if __name__ == "__main__":
    main()
