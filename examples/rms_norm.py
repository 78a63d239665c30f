"""RMSNorm (Zhang & Sennrich 2019) with rstd, the smallest thing that backward needs, saved beside the inputs."""

import torch
from compare import compare

import fusegrad


@fusegrad.compile
class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx, grad_output):
        x, weight, rstd = ctx.saved_tensors
        x_hat = x * rstd
        scaled = grad_output * weight
        grad_x = rstd * (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True))
        grad_weight = (grad_output * x_hat).sum(0)
        return grad_x, grad_weight, None


AsWritten = RMSNorm.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    x, weight = torch.randn(48, 257, requires_grad=True), torch.randn(257, requires_grad=True)
    compare("RMSNorm", AsWritten.apply, RMSNorm.apply, x, weight, 1e-6)


if __name__ == "__main__":
    main()
