"""LayerNorm (Ba et al. 2016): mean and rstd of each row are saved; x_hat is computed again in backward."""

import torch
from compare import compare

import fusegrad


@fusegrad.compile
class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        mean = x.mean(-1, keepdim=True)
        rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return (x - mean) * rstd * weight + bias

    @staticmethod
    def backward(ctx, grad_output):
        x, weight, mean, rstd = ctx.saved_tensors
        x_hat = (x - mean) * rstd
        scaled = grad_output * weight
        along_x_hat = x_hat * (scaled * x_hat).mean(-1, keepdim=True)
        grad_x = rstd * (scaled - scaled.mean(-1, keepdim=True) - along_x_hat)
        return grad_x, (grad_output * x_hat).sum(0), grad_output.sum(0), None


AsWritten = LayerNorm.__base__  # a compiled class is a subclass of the class as written


def main():
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in [(48, 257), (257,), (257,)])
    compare("LayerNorm", AsWritten.apply, LayerNorm.apply, x, weight, bias, 1e-5)


if __name__ == "__main__":
    main()
