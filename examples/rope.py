"""Rotary position embedding (Su et al. 2021), halves rotated: backward is the rotation by the opposite angle."""

import torch
from compare import compare

import fusegrad


def rotate(x, cos, sin):
    """The two halves of the last dimension as the coordinates of points in a plane."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@fusegrad.compile
class RoPE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad_output):
        cos, sin = ctx.saved_tensors
        return rotate(grad_output, cos, -sin), None, None


AsWritten = RoPE.__base__  # a compiled class is a subclass of the class as written


def angles(length, width, base=10_000.0):
    frequency = base ** (-torch.arange(0, width, 2) / width)
    turned = torch.outer(torch.arange(length), frequency)
    return turned.cos(), turned.sin()


def main():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 40, 64, requires_grad=True)  # batch, heads, positions, width of a head
    compare("RoPE", AsWritten.apply, RoPE.apply, x, *angles(40, 64))


if __name__ == "__main__":
    main()
