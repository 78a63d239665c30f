"""SwiGLU (Shazeer 2020): backward computes the sigmoid again, so that only the two inputs are saved."""

import torch
from compare import compare

import fusegrad


@fusegrad.compile
class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return gate * torch.sigmoid(gate) * up

    @staticmethod
    def backward(ctx, grad_output):
        gate, up = ctx.saved_tensors
        s = torch.sigmoid(gate)
        return grad_output * up * s * (1 + gate * (1 - s)), grad_output * gate * s


AsWritten = SwiGLU.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    gate, up = (torch.randn(48, 257, requires_grad=True) for _ in range(2))
    compare("SwiGLU", AsWritten.apply, SwiGLU.apply, gate, up)


if __name__ == "__main__":
    main()
