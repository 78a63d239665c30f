"""ReLU by clamp_min, saving its input: the C++ example of the PyTorch notes, in Python and in ctx style."""

import torch
from compare import compare

import fusegrad


@fusegrad.compile
class ReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp_min(0)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * (x > 0).to(grad_output.dtype)


ReLUAsWritten = ReLU.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    compare("relu", ReLUAsWritten.apply, ReLU.apply, torch.randn(64, 100, requires_grad=True))
    # the same kernels serve another batch size
    compare("\nrelu, another batch size", ReLUAsWritten.apply, ReLU.apply, torch.randn(7, 100, requires_grad=True))


if __name__ == "__main__":
    main()
