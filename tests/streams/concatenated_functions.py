"""Attention with keys and values in pieces: registers, sinks and caches before or behind them."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

Tensor = torch.Tensor


def gradients(q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dp = g @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / 4
    return ds @ k, ds.mT @ q, p.mT @ g


class Behind(Function):
    """Registers of each head behind the keys; backward puts them together again."""

    @staticmethod
    def forward(ctx, q, k, v, rk, rv):
        s = q @ torch.cat([k, rk], 2).mT / 4
        lse = torch.logsumexp(s, -1, keepdim=True)
        ctx.save_for_backward(q, k, v, rk, rv, lse)
        return torch.exp(s - lse) @ torch.cat([v, rv], 2)

    @staticmethod
    def backward(ctx, g):
        q, k, v, rk, rv, lse = ctx.saved_tensors
        kk, vv, n = torch.cat([k, rk], 2), torch.cat([v, rv], 2), k.shape[2]
        dq, dk, dv = gradients(q, kk, vv, torch.exp(q @ kk.mT / 4 - lse), g)
        return dq, dk[:, :, :n], dv[:, :, :n], dk[:, :, n:], dv[:, :, n:]


class Before(Function):
    """A sink that all heads share, a prefix, and keys, under a causal mask of these; what is saved is the whole."""

    @staticmethod
    def forward(ctx, q, k, v, sink, prefix):
        b, h, n, d = q.shape
        first = [sink.expand(b, h, 1, d), prefix]
        kk, vv = torch.cat([*first, k], 2), torch.cat([*first, v], 2)
        ctx.start = 1 + prefix.shape[2]
        seen = torch.ones(n, n + ctx.start, dtype=torch.bool, device=q.device).tril(ctx.start)
        p = torch.softmax((q @ kk.mT / 4).masked_fill(~seen, float("-inf")), -1)
        ctx.save_for_backward(q, kk, vv, p)
        return p @ vv

    @staticmethod
    def backward(ctx, g):
        dq, dk, dv = gradients(*ctx.saved_tensors, g)
        first = dk[:, :, : ctx.start] + dv[:, :, : ctx.start]
        return dq, dk[:, :, ctx.start :], dv[:, :, ctx.start :], first[:, :, :1].sum((0, 1)), first[:, :, 1:]


class Cache(Function):
    """New keys behind those of a cache, two heads on each of them."""

    @staticmethod
    def forward(ctx, q, k, v, past_k, past_v):
        n, t = k.shape[2], past_k.shape[2]
        kk, vv = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        i, j = torch.arange(n, device=q.device)[:, None] + t, torch.arange(t + n, device=q.device)
        s = q @ kk[:, :, None].mT / 4
        p = torch.softmax(s.masked_fill(j > i, float("-inf")), -1)
        ctx.save_for_backward(q, kk, vv, p)
        ctx.t = t
        return p @ vv[:, :, None]

    @staticmethod
    def backward(ctx, g):
        q, kk, vv, p = ctx.saved_tensors
        dq, dk, dv = gradients(q, kk[:, :, None], vv[:, :, None], p, g)
        dk, dv, t = dk.sum(2), dv.sum(2), ctx.t
        return dq, dk[:, :, t:], dv[:, :, t:], dk[:, :, :t], dv[:, :, :t]


def shapes_of(cls: Any, b: int, h: int, n: int, d: int, r: int) -> list[tuple[int, ...]]:
    rows, few = (b, h, n, d), (b, h, r, d)
    if cls is Cache:
        return [(b, h, 2, n, d), rows, rows, few, few]
    return [rows, rows, rows, *([few, few] if cls is Behind else [(1, d), few])]


def arguments(cls: Any, *sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    random = torch.Generator().manual_seed(5)
    made = (torch.randn(s, generator=random) for s in shapes_of(cls, *sizes))
    return [a.to(dtype).requires_grad_() for a in made]


def described(cls: Any, r: int) -> list[str]:
    """Usual sizes, without memory."""
    return [f"bf16[{','.join(map(str, s))}]" for s in shapes_of(cls, 4, 16, 4096, 64, r)]
