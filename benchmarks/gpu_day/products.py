"""A product of matrices with what follows it in one kernel, beside the library: right, and which is faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import fusegrad
from fusegrad.runtime.profile.tuning import tune_function

from .checks import SEEDS, beside_eager, through_torch

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
SIZES = {"cuda": (64, 1024, 1024, 64), "pretended": (2, 32, 48, 16)}
"""Batch, queries, keys, width."""


class Scores(Function):
    """Attention's scores: scale * q @ k^T + mask."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k)
        ctx.scale = scale
        return torch.bmm(q, k.mT) * scale + mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k = ctx.saved_tensors
        scaled = grad * ctx.scale
        return torch.bmm(scaled, k), torch.bmm(scaled.mT, q), None, None


def products(unit: str, kind: str) -> dict[str, Any]:
    """Forward and backward beside eager and float64; then both ways timed, as `tune` does it."""
    batch, queries, keys, width = SIZES[kind]
    numbers = torch.Generator().manual_seed(SEEDS[0])
    shapes = ((batch, queries, width), (batch, keys, width), (batch, queries, keys))
    q, k, mask = (torch.randn(s, generator=numbers).to("cuda", DTYPES[unit]) for s in shapes)
    args = [q.requires_grad_(), k.requires_grad_(), mask, 0.125]
    fast: Any = fusegrad.compile(Scores, backend="triton", fullgraph=True)
    wrong, equal = beside_eager(fast, Scores, args, SEEDS[0])
    planned = {kernel.name: kernel.kind for kernel in fusegrad.explain(fast, *args).kernels}
    trials = tune_function(fast, *args).to_dict()["trials"]
    return {"faults": [*wrong, *through_torch(fast)], "equal": equal, "launched": planned, "trials": trials}
