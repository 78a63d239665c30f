"""Residual add and RMSNorm in one Function with two outputs: the normalised sum, and the sum for the next block."""

import torch
from compare import compare

import fusegrad


@fusegrad.compile
class AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        total = x + residual
        rstd = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(total, weight, rstd)
        return total * rstd * weight, total

    @staticmethod
    def backward(ctx, grad_normed, grad_total):
        total, weight, rstd = ctx.saved_tensors
        x_hat = total * rstd
        scaled = grad_normed * weight
        grad_sum = rstd * (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True)) + grad_total
        return grad_sum, grad_sum, (grad_normed * x_hat).sum(0), None


AsWritten = AddRMSNorm.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(shape, requires_grad=True) for shape in [(48, 257), (48, 257), (257,)])
    compare("add + RMSNorm", AsWritten.apply, AddRMSNorm.apply, x, residual, weight, 1e-6)


if __name__ == "__main__":
    main()
