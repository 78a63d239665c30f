"""Attention and its kin as users write them in plain PyTorch, at the shapes that their kernels are compiled for.

Their matmuls outgrow their operands; nothing here says how to do without them in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fusegrad.examples.gallery import attention, info_nce

from .suite import Case

INF = float("inf")
Attention: Any = attention.Attention.__base__
"""As its file has it, uncompiled."""
InfoNCE: Any = info_nce.InfoNCE.__base__


def places(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Those of rows as a column, and those of columns as a row."""
    rows, columns = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
    return rows[:, None], columns[None, :]


def gradients(p: Tensor, ds: Tensor, q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k and v, from weights and the gradient of the products."""
    return ds @ k, ds.mT @ q, p.mT @ g


class ALiBi(Function):
    """Causal attention; scores fall with the distance, for each head by a slope of its own."""

    @staticmethod
    def weights(q: Tensor, k: Tensor, slopes: Tensor, scale: float) -> Tensor:
        s = (q @ k.mT) * scale
        i, j = places(s)
        return torch.softmax(torch.where(i >= j, s + slopes[:, None, None] * (j - i), -INF), -1)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, scale: float) -> Tensor:
        out = ALiBi.weights(q, k, slopes, scale) @ v
        ctx.save_for_backward(q, k, v, slopes, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, slopes, out = ctx.saved_tensors
        p = ALiBi.weights(q, k, slopes, ctx.scale)
        ds = p * (g @ v.mT - (g * out).sum(-1, keepdim=True)) * ctx.scale
        return *gradients(p, ds, q, k, g), None, None


class SoftcapWindow(Function):
    """A tanh caps the scores, and a query sees `width` places of the past."""

    @staticmethod
    def capped(q: Tensor, k: Tensor, scale: float, cap: float) -> Tensor:
        return torch.tanh((q @ k.mT) * (scale / cap))

    @staticmethod
    def weights(t: Tensor, cap: float, width: int) -> Tensor:
        i, j = places(t)
        return torch.softmax(torch.where((i >= j) & (i - j < width), t * cap, -INF), -1)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, width: int) -> Tensor:
        out = SoftcapWindow.weights(SoftcapWindow.capped(q, k, scale, cap), cap, width) @ v
        ctx.save_for_backward(q, k, v, out)
        ctx.numbers = scale, cap, width
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, out = ctx.saved_tensors
        scale, cap, width = ctx.numbers
        t = SoftcapWindow.capped(q, k, scale, cap)
        p = SoftcapWindow.weights(t, cap, width)
        ds = p * (g @ v.mT - (g * out).sum(-1, keepdim=True)) * (1 - t * t) * scale
        return *gradients(p, ds, q, k, g), None, None, None


class LearnedBias(Function):
    """A bias for each head and pair of places, which has a gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        p = torch.softmax((q @ k.mT) * scale + bias, -1)
        out = p @ v
        ctx.save_for_backward(q, k, v, bias, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, bias, out = ctx.saved_tensors
        p = torch.softmax((q @ k.mT) * ctx.scale + bias, -1)
        ds = p * (g @ v.mT - (g * out).sum(-1, keepdim=True))
        return *gradients(p, ds * ctx.scale, q, k, g), ds.sum(0), None


class SigmoidAttention(Function):
    """No row is normalized."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, shift: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale, ctx.shift = scale, shift
        return torch.sigmoid((q @ k.mT) * scale + shift) @ v

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        p = torch.sigmoid((q @ k.mT) * ctx.scale + ctx.shift)
        ds = (g @ v.mT) * p * (1 - p) * ctx.scale
        return *gradients(p, ds, q, k, g), None, None


class LinearCrossEntropy(Function):
    """The logits of a classifier without a bias, and their mean loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        z = x @ w.mT
        ctx.save_for_backward(x, w, target)
        return (torch.logsumexp(z, -1, keepdim=True) - z.gather(1, target[:, None])).mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, target = ctx.saved_tensors
        p = torch.softmax(x @ w.mT, -1)
        hot = torch.arange(w.shape[0], device=x.device)[None, :] == target[:, None]
        dz = (p - hot.to(p.dtype)) * (g / x.shape[0])
        return dz @ w, dz.mT @ x, None


# ------------------------------------------------------------------ the cases
BATCH, HEADS, SHARED_HEADS, LENGTH, CLASSES = 2, 16, 4, 4096, 32000
WIDTHS = (64, 128)
SCORES = BATCH * HEADS * LENGTH * LENGTH


def heads(d: int, count: int = HEADS) -> str:
    return f"bf16[{BATCH},{count},{LENGTH},{d}]"


def _cases(d: int) -> list[tuple[str, Case, int]]:
    """Each with a name in words, and the elements of its matrix of scores."""
    qkv, scale, shape = (heads(d),) * 3, d**-0.5, f"{BATCH},{HEADS},{LENGTH},{d}"
    grouped = (heads(d), *(heads(d, SHARED_HEADS),) * 2)
    rows, columns = f"bf16[{LENGTH},{d}]", f"bf16[{CLASSES},{d}]"
    return [
        ("softmax, p is saved", Case(Attention, shape, (*qkv, scale, False)), SCORES),
        ("causal, grouped heads", Case(Attention, f"{shape},causal", (*grouped, scale, True)), SCORES),
        ("ALiBi", Case(ALiBi, shape, (*qkv, f"bf16[{HEADS}]", scale)), SCORES),
        ("window and softcap", Case(SoftcapWindow, shape, (*qkv, scale, 50.0, 1024)), SCORES),
        ("learned bias", Case(LearnedBias, shape, (*qkv, f"bf16[{HEADS},{LENGTH},{LENGTH}]", scale)), SCORES),
        ("sigmoid", Case(SigmoidAttention, shape, (*qkv, scale, -8.3)), SCORES),
        ("linear cross-entropy", Case(LinearCrossEntropy, f"{LENGTH},{d}x{CLASSES}", (rows, columns, f"i64[{LENGTH}]")),
         LENGTH * CLASSES),
        ("InfoNCE", Case(InfoNCE, f"{LENGTH},{d}", (rows, rows, 0.1)), LENGTH * LENGTH),
    ]  # fmt: skip


STREAMS = {case.name: (words, case, scores) for d in WIDTHS for words, case, scores in _cases(d)}
