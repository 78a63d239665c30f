"""Beside the suite: other layouts, and Functions that save more than they need. One kernel each way, each byte once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

import fusegrad
from fusegrad.benchmarks.plans import plan
from fusegrad.benchmarks.suite import Case


# ------------------------------------------------------------------ layouts
class InterleavedRoPE(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return turned(grad, cos, -sin), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second, c, s = x[..., 0::2], x[..., 1::2], cos[:, None, :], sin[:, None, :]
    return torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)


class PackedSwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors[0].float().chunk(2, -1)
        s = torch.sigmoid(gate)
        return torch.cat((grad.float() * up * s * (1 + gate * (1 - s)), grad.float() * gate * s), -1).to(grad.dtype)


class UnpackedInt4(Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        return (nibbles(packed) * scale[:, None]).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, (grad.float() * nibbles(ctx.saved_tensors[0])).sum(-1)


def nibbles(packed: Tensor) -> Tensor:
    both = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).float()
    return torch.where(both > 7, both - 16, both)


class OddChunks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        a, b, c = x.split([1000, 2000, 1099], -1)
        return torch.cat((c.tanh(), a.exp(), b.sigmoid()), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b, c = ctx.saved_tensors[0].split([1000, 2000, 1099], -1)
        gc, ga, gb = grad.split([1099, 1000, 2000], -1)
        return torch.cat((ga * a.exp(), gb * b.sigmoid() * (1 - b.sigmoid()), gc * (1 - c.tanh() ** 2)), -1)


class RunningSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.float().cumsum(-1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.float().flip(-1).cumsum(-1).flip(-1).to(grad.dtype)


class BatchNorm(Function):
    """In training, over the first and the last axes"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        var, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0)
        rstd = (var + 1e-5).rsqrt()
        ctx.save_for_backward(x, weight, mean, rstd)
        scale = rstd * weight.float()
        return ((x.float() - wide(mean)) * wide(scale) + wide(bias.float())).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        g, xhat, count = grad.float(), (x.float() - wide(mean)) * wide(rstd), x.numel() // x.shape[1]
        dw, db = (g * xhat).sum((0, 2, 3)), g.sum((0, 2, 3))
        return wide(weight.float() * rstd) * (g - wide(db / count) - xhat * wide(dw / count)), dw, db


def wide(x: Tensor) -> Tensor:
    return x[:, None, None]


# ------------------------------------------------------------------ savers of what need not be saved
class SavesXhat(Function):
    """x, x-hat and rstd, where x and rstd are enough"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rstd = (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        xhat = x.float() * rstd
        ctx.save_for_backward(x, xhat, rstd, weight)
        return (xhat * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, xhat, rstd, weight = ctx.saved_tensors
        scaled = grad.float() * weight.float()
        return rstd * (scaled - xhat * (scaled * xhat).mean(-1, keepdim=True)), (grad.float() * xhat).sum(0)


class SavesSigmoid(Function):
    """sigmoid and silu beside gate and up"""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        s = torch.sigmoid(gate.float())
        ctx.save_for_backward(gate, up, s, gate.float() * s)
        return (gate.float() * s * up.float()).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, up, s, silu = ctx.saved_tensors
        return grad.float() * up.float() * (s + silu * (1 - s)), grad.float() * silu


class SavesMask(Function):
    """the mask of a dropout, where its seed is enough"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor) -> Tensor:
        keep = fusegrad.random.uniform(x.shape, seed, 0, like=x) >= 0.1
        ctx.save_for_backward(keep, seed)
        return torch.where(keep, x / 0.9, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.where(ctx.saved_tensors[0], grad / 0.9, 0), None


class SavesProbabilities(Function):
    """those of a cross-entropy, in float32"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
        p = torch.softmax(x.float(), -1)
        ctx.save_for_backward(x, p, target)
        return -p.gather(-1, target[:, None])[:, 0].log().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, p, target = ctx.saved_tensors
        hot = target[:, None] == torch.arange(p.shape[-1], device=p.device)
        return (p - hot.float()) * (grad / p.shape[0]), None


ROW = 4096 * 4096 * 2
CASES: list[tuple[type, tuple[Any, ...], int]] = [
    (InterleavedRoPE, ("bf16[4,4096,32,128]", "bf16[4096,64]", "bf16[4096,64]"), 2 * 4096 * 64 * 2),
    (PackedSwiGLU, ("bf16[4096,8192]",), 2 * ROW),
    (UnpackedInt4, ("u8[4096,4096]", "f32[4096]"), ROW // 2),
    (OddChunks, ("bf16[4096,4099]",), 4096 * 4099 * 2),
    (RunningSum, ("bf16[4096,4096]",), 0),
    (BatchNorm, ("bf16[32,512,64,64]", "bf16[512]", "bf16[512]"), 32 * 512 * 4096 * 2 + 512 * 10),
    (SavesXhat, ("bf16[4096,4096]", "bf16[4096]"), ROW + 4096 * 6),
    (SavesSigmoid, ("bf16[4096,4096]", "bf16[4096,4096]"), 2 * ROW),
    (SavesMask, ("bf16[4096,4096]", "i64[1]"), 8),
    (SavesProbabilities, ("bf16[4096,4096]", "i64[4096]"), ROW + 4096 * 16),
]
"""A class, its arguments, and the bytes that have to be saved."""


@pytest.mark.parametrize(("function", "args", "saved"), CASES, ids=[f.__name__ for f, *_ in CASES])
def test_one_kernel_each_way(function: type, args: tuple[Any, ...], saved: int) -> None:
    found = plan(Case(function, "", args))
    assert found["launches"] == [1, 1] and found["library"] == [0, 0]
    assert all(moved <= 1.05 * least for moved, least in zip(found["bytes"], found["minimal"], strict=True)), found
    assert found["saved"] <= min(saved, found["asked"])
