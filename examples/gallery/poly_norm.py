"""PolyNorm (Zhuo et al. 2024): a polynomial activation whose three powers are each normalised."""

import torch

import fusegrad


def normalised(x, power, eps):
    """x^power over its root mean square, and one over that."""
    p = x**power
    rstd = torch.rsqrt(p.square().mean(-1, keepdim=True) + eps)
    return p * rstd, rstd


@fusegrad.compile
class PolyNorm(torch.autograd.Function):
    """weight[0] * norm(x^3) + weight[1] * norm(x^2) + weight[2] * norm(x) + bias"""

    @staticmethod
    def forward(x, weight, bias, eps):
        h = x.to(torch.promote_types(x.dtype, torch.float32))
        y = sum(weight[i] * normalised(h, 3 - i, eps)[0] for i in range(3)) + bias
        return y.to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        h, grad = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (x, grad_output))
        grad_x, grad_weight = torch.zeros_like(h), []
        for i, power in enumerate((3, 2, 1)):
            p_hat, rstd = normalised(h, power, ctx.eps)
            along = (grad * p_hat).mean(-1, keepdim=True)
            grad_x = grad_x + weight[i] * rstd * (grad - p_hat * along) * power * h ** (power - 1)
            grad_weight.append((grad * p_hat).sum())
        return grad_x.to(x.dtype), torch.stack(grad_weight), grad.sum(), None
