"""Rows that a mask leaves nothing of, in whole blocks that are never walked: NaN in the same places as eager's."""

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
from beside_eager import differences

INF = float("inf")


def _by_logarithm(s: Tensor) -> Tensor:
    return torch.exp(s - torch.logsumexp(s, -1, keepdim=True))


def _in_another_walk(s: Tensor) -> Tensor:
    """A sum over the keys that reads what another sum over them has found, and does not separate from it."""
    return torch.sigmoid(s - torch.logsumexp(s, -1, keepdim=True))


def _numerators(s: Tensor) -> Tensor:
    """Relative to a maximum, and divided by nothing."""
    return torch.exp(s - s.amax(-1, keepdim=True))


def _above_a_least_sum(s: Tensor) -> Tensor:
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return p / p.sum(-1, keepdim=True).clamp_min(1e-6)


def _safe(s: Tensor) -> Tensor:
    """Zero where there is nothing, as its author wants it."""
    top = s.amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(top == -INF, 0.0, top))
    return p / p.sum(-1, keepdim=True).clamp_min(1e-6)


def _own_logarithm(s: Tensor) -> Tensor:
    """log(0) where a sum of nothing is zero, and NaN in eager."""
    top = s.amax(-1, keepdim=True)
    return top + torch.log(torch.exp(s - top).sum(-1, keepdim=True))


WAYS = (_by_logarithm, _in_another_walk, _numerators, _above_a_least_sum, _safe, _own_logarithm)
WEIGHTS = {f.__name__.strip("_"): f for f in WAYS}


def late(way: str) -> Any:
    """The last of many queries alone see the few keys that there are."""

    class Late(Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            s = q @ k.mT * 0.3
            n, m = s.shape[-2:]
            i, j = torch.arange(n, device=s.device)[:, None], torch.arange(m, device=s.device)
            made = WEIGHTS[way](s.masked_fill(j - i > m - n, -INF))
            ctx.save_for_backward(q, k, v)
            return made + q.sum(-1, keepdim=True) if way == "own_logarithm" else made @ v

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
            q, k, v = ctx.saved_tensors
            return q * g.sum(), k * g.sum(), v * g.sum()

    return Late


@pytest.mark.parametrize("way", WEIGHTS)
def test_rows_without_a_key(way: str) -> None:
    Late = late(way)
    random = torch.Generator().manual_seed(1)
    arguments = [torch.randn(1, 2, n, 13, generator=random).requires_grad_() for n in (150, 20, 20)]
    fast = fusegrad.compile(Late, backend="interpret", fullgraph=True)
    exact = Late.apply(*[a.detach().double() for a in arguments])
    assert exact.isnan().any() or way == "safe"
    assert not differences(fast.apply, Late.apply, arguments)


def test_what_is_relative_to_a_logarithm_needs_no_walk_of_its_own() -> None:
    """torch's logsumexp is a choice: the maximum itself where that is infinite."""
    arguments = [torch.empty(2, 4, 1024, 64, dtype=torch.bfloat16, device="meta").requires_grad_() for _ in "qkv"]
    explained = fusegrad.explain(fusegrad.compile(late("by_logarithm")), *arguments, target="cuda:90")
    assert explained.directions["forward"].launch_count == 1
    assert explained.kernels[0].source.count("for col_at") == 2  # blocks of which all is seen, and those at the edge


# ------------------------------------------------------------------ backward, where masks of data stand beside others
def _causal(s: Tensor) -> Tensor:
    n, m = s.shape[-2:]
    return torch.arange(n, device=s.device)[:, None] >= torch.arange(m, device=s.device)


def _padding(s: Tensor, kept: Tensor) -> Tensor:
    return s.masked_fill(~(_causal(s) & kept[:, None, None]), -INF)


def _window(s: Tensor, kept: Tensor) -> Tensor:
    is_near = torch.triu(torch.ones_like(s[0, 0], dtype=torch.bool), -7)
    return s.masked_fill(~(_causal(s) & is_near & kept[:, None, None]), -INF)


def _documents(s: Tensor, kept: Tensor) -> Tensor:
    document = kept.cumsum(-1)
    return s.masked_fill(~(_causal(s) & (document[:, None, :, None] == document[:, None, None, :])), -INF)


def _lengths(s: Tensor, kept: Tensor) -> Tensor:
    """Of the first sequence no key is left."""
    length = kept.sum(-1) * kept[:, 0]
    return s.masked_fill(torch.arange(s.shape[-1], device=s.device) >= length[:, None, None, None], -INF)


def _added(s: Tensor, kept: Tensor) -> Tensor:
    """A mask of numbers, outside of the choice."""
    mask = torch.where(kept, 0.0, -INF).to(s.dtype)
    return s.masked_fill(~_causal(s), -INF) + mask[:, None, None]


def _chosen_of_added(s: Tensor, kept: Tensor) -> Tensor:
    mask = torch.where(kept, 0.0, -INF).to(s.dtype)
    return (s + mask[:, None, None]).masked_fill(~_causal(s), -INF)


BESIDE = {f.__name__.strip("_"): f for f in (_padding, _window, _documents, _lengths, _added, _chosen_of_added)}


def masked(name: str) -> Any:
    mask = BESIDE[name]

    class Masked(Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
            s = mask(q @ k.mT * 0.3, kept)
            ctx.save_for_backward(q, k, v, kept, torch.logsumexp(s, -1, keepdim=True))
            return torch.softmax(s, -1) @ v

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
            q, k, v, kept, lse = ctx.saved_tensors
            p = torch.exp(mask(q @ k.mT * 0.3, kept) - lse)
            dp = g @ v.mT
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * 0.3
            return ds @ k, ds.mT @ q, p.mT @ g, None

    return Masked


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_skipped_is_nan_where_data_leaves_a_row_nothing(name: str) -> None:
    """A query of nothing makes the gradients of all keys NaN, those too that it cannot see."""
    Masked = masked(name)
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 1, 150, 13, generator=random).requires_grad_() for _ in "qkv")
    kept = torch.rand(2, 150, generator=random) < 0.7
    kept[:, 0], kept[0, :3] = True, False
    fast = fusegrad.compile(Masked, backend="interpret", fullgraph=True)
    exact = torch.autograd.grad(Masked.apply(q, k, v, kept).sum(), (k, v))
    assert exact[0][0].isnan().all() != (name == "documents") and not exact[0][1].isnan().any()
    assert not differences(fast.apply, Masked.apply, [q, k, v, kept])


@pytest.mark.parametrize("name", BESIDE)
def test_they_are_skipped_all_the_same(name: str) -> None:
    arguments = [torch.empty(2, 4, 1024, 64, dtype=torch.bfloat16, device="meta").requires_grad_() for _ in "qkv"]
    kept = torch.empty(2, 1024, dtype=torch.bool, device="meta")
    explained = fusegrad.explain(fusegrad.compile(masked(name)), *arguments, kept, target="cuda:90")
    walks = [k.walk for k in explained.kernels if k.walk]
    assert len(walks) == 3 and all("skips blocks" in w for w in walks)
