"""RMSNorm, then a gate of silu, as Mamba-2 and Qwen3-Next have it; nothing wide but the inputs is saved."""

import torch

import fusegrad


@fusegrad.compile
class GatedRMSNorm(torch.autograd.Function):
    """x / rms(x) * weight * silu(gate)"""

    @staticmethod
    def forward(ctx, x, gate, weight, eps):
        h, g = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (x, gate))
        rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, gate, weight, rstd)
        return (h * rstd * weight * g * torch.sigmoid(g)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        x, gate, weight, rstd = ctx.saved_tensors
        grad, g = grad_output.to(rstd.dtype), gate.to(rstd.dtype)
        s = torch.sigmoid(g)
        x_hat = x * rstd
        normed, opened = x_hat * weight, grad * g * s
        grad_gate = grad * normed * s * (1 + g * (1 - s))
        scaled = opened * weight
        grad_x = rstd * (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), grad_gate.to(gate.dtype), (opened * x_hat).sum_to_size(weight.shape), None
