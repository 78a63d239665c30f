"""Keys that are values as well, one for several heads: their gradient is a sum over heads of a sum of products."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import differences, transposed_heads


class Latent(Function):
    """Queries of two parts beside a latent that all heads share, and a key for positions: keys and values at once."""

    @staticmethod
    def forward(ctx: Any, of_latent: Tensor, of_place: Tensor, latent: Tensor, place: Tensor, scale: float) -> Tensor:
        s = (of_latent @ latent[:, None].mT + of_place @ place[:, None].mT) * scale
        n, m = s.shape[-2:]
        i = torch.arange(n, device=s.device)[:, None]
        s = s.masked_fill(torch.arange(m, device=s.device) > i + (m - n), -torch.inf)
        p = s.softmax(-1)
        ctx.save_for_backward(of_latent, of_place, latent, place, p)
        ctx.scale = scale
        return p @ latent[:, None]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        of_latent, of_place, latent, place, p = ctx.saved_tensors
        dp = g @ latent[:, None].mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * ctx.scale
        shared = (ds.mT @ of_latent + p.mT @ g).sum(1)
        return ds @ latent[:, None], ds @ place[:, None], shared, (ds.mT @ of_place).sum(1), None


class Grouped(Function):
    """The same of groups of heads, scaled behind the products."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, c: Tensor, scale: float) -> Tensor:
        every = c.repeat_interleave(q.shape[1] // c.shape[1], 1)
        p = (q @ every.mT * scale).softmax(-1)
        ctx.save_for_backward(q, c, p)
        ctx.scale = scale
        return p @ every

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, c, p = ctx.saved_tensors
        groups = (c.shape[1], q.shape[1] // c.shape[1])
        every = c.repeat_interleave(groups[1], 1)
        dp = g @ every.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        shared = (ctx.scale * (ds.mT @ q) + p.mT @ g).unflatten(1, groups).sum(2)
        return ds @ every * ctx.scale, shared, None


def described(cls: Any, n: int, m: int, depth: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Any, ...]:
    torch.manual_seed(n)
    heads = 4 if cls is Latent else 6
    q, place = ((2, heads, n, depth), (2, heads, n, 5)), ((2, m, depth), (2, m, 5))
    shapes = (*q, *place) if cls is Latent else (q[0], (2, 2, m, depth))
    return (*(torch.randn(s, dtype=dtype, device=device).requires_grad_() for s in shapes), depth**-0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [Latent, Grouped])
def test_beside_eager(cls: Any, dtype: torch.dtype) -> None:
    fast = fusegrad.compile(cls, backend="interpret")
    arguments = described(cls, 17, 23, 11, dtype)
    assert not differences(fast.apply, cls.apply, tuple(map(transposed_heads, arguments)), transposed_heads)


@pytest.mark.parametrize("cls", [Latent, Grouped])
def test_scores_are_never_in_memory(cls: Any) -> None:
    explained = fusegrad.explain(fusegrad.compile(cls), *described(cls, 4096, 4096, 64, torch.bfloat16, "meta"))
    forward, backward = explained.directions.values()
    assert (forward.launch_count, backward.launch_count) <= (1, 3)
    scores = 2 * (4 if cls is Latent else 6) * 4096**2 * 2
    assert max(forward.moved, backward.moved) < scores / 2
