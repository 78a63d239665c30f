"""Losses of sequences in pairs: halves are read of sums over the rows and columns of what is never in memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import differences


class Preferences(Function):
    """Of two halves of a batch the first is preferred: its sequences are to be likelier than those of the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, target: Tensor, reference: Tensor, beta: float) -> Tensor:
        logp = torch.log_softmax((x @ w.T).float(), -1)
        sums = logp.gather(-1, target[..., None]).squeeze(-1).sum(-1) - reference
        half = x.shape[0] // 2
        margin = beta * (sums[:half] - sums[half:])
        ctx.save_for_backward(x, w, target, logp, margin)
        ctx.beta = beta
        return -F.logsigmoid(margin).mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w, target, logp, margin = ctx.saved_tensors
        d = -torch.sigmoid(-margin) * ctx.beta * g / margin.shape[0]
        d = torch.cat([d, -d])[:, None, None]
        ds = (d * (F.one_hot(target, logp.shape[-1]) - logp.exp())).to(x.dtype)
        return ds @ w, torch.einsum("bsv,bsd->vd", ds, x), None, None, None


def described(batch: int, length: int, depth: int, words: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    x, w = (torch.randn(s, dtype=dtype, device=device) for s in ((batch, length, depth), (words, depth)))
    target = torch.randint(0, words, (batch, length), device=device)
    return x.requires_grad_(), w.requires_grad_(), target, torch.randn(batch, device=device), 0.1


def test_beside_eager() -> None:
    fast = fusegrad.compile(Preferences, backend="interpret")
    assert not differences(fast.apply, Preferences.apply, described(6, 7, 11, 37, torch.float32, "cpu"))


def test_logits_are_never_in_memory() -> None:
    arguments = described(8, 1024, 64, 32768, torch.bfloat16, "meta")
    explained = fusegrad.explain(fusegrad.compile(Preferences), *arguments)
    assert all(d.moved < 2 * d.minimal for d in explained.directions.values())
