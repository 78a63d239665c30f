"""Tiles of scores that an index adds into a small table: summed in the kernel that makes them, in a fixed order."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))

from beside_eager import differences, expanded, transposed_heads

HEADS, ROWS, COLUMNS, DEPTH, BINS = 2, 21, 35, 16, 5


def weights(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT + bias, -1)


def gradient_of_scores(q: Tensor, k: Tensor, v: Tensor, out: Tensor, bias: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    p = weights(q, k, bias)
    return p, p * (g @ v.mT - (g * out).sum(-1, keepdim=True))


class ByBucket(Function):
    """Buckets are given; `index_add` along flattened places."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, buckets: Tensor) -> Tensor:
        out = weights(q, k, table[buckets].permute(2, 0, 1)) @ v
        ctx.save_for_backward(q, k, v, table, buckets, out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, table, buckets, out = ctx.saved_tensors
        p, ds = gradient_of_scores(q, k, v, out, table[buckets].permute(2, 0, 1), g)
        rows = ds.sum(0).permute(1, 2, 0).reshape(-1, table.shape[1])
        return ds @ k, ds.mT @ q, p.mT @ g, torch.zeros_like(table).index_add(0, buckets.reshape(-1), rows), None


class ByDistance(Function):
    """Buckets are made of places; `index_put` into what may hold something, its heads last."""

    @staticmethod
    def buckets(q: Tensor, k: Tensor, count: int) -> Tensor:
        far = torch.arange(k.shape[-2], device=q.device)[None, :] - torch.arange(q.shape[-2], device=q.device)[:, None]
        log = torch.log2(far.abs().clamp(min=1).float()).long().clamp(max=count // 2 - 1)
        return torch.where(far > 0, log + count // 2, log)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        bias = torch.nn.functional.embedding(ByDistance.buckets(q, k, table.shape[0]), table).permute(2, 0, 1)
        out = weights(q, k, bias) @ v
        ctx.save_for_backward(q, k, v, table, out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, table, out = ctx.saved_tensors
        buckets = ByDistance.buckets(q, k, table.shape[0])
        p, ds = gradient_of_scores(q, k, v, out, torch.nn.functional.embedding(buckets, table).permute(2, 0, 1), g)
        d_table = (0.5 * table).index_put((buckets,), ds.sum(0).permute(1, 2, 0), accumulate=True)
        return ds @ k, ds.mT @ q, p.mT @ g, d_table


class OneTable(Function):
    """One table for all heads, each sample with buckets of its own, of one sample no sum over a batch; heads first."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, buckets: Tensor) -> Tensor:
        out = weights(q, k, table[buckets]) @ v
        ctx.save_for_backward(q, k, v, table, buckets, out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, table, buckets, out = ctx.saved_tensors
        p, ds = gradient_of_scores(q, k, v, out, table[buckets], g)
        d_table = torch.zeros_like(table).index_add(0, buckets.flatten(), ds.flatten())
        return ds @ k, ds.mT @ q, p.mT @ g, d_table, None


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


def buckets_of(*shape: int) -> Tensor:
    return torch.randint(0, BINS, shape, generator=torch.Generator().manual_seed(1))


def arguments(cls: type, dtype: torch.dtype, batch: int = 2) -> tuple[Tensor, ...]:
    """q, k, v, a table, buckets."""
    lead = (batch, HEADS) if cls is not OneTable else (batch,)
    qkv = (drawn(dtype, *lead, ROWS, DEPTH), drawn(dtype, *lead, COLUMNS, DEPTH), drawn(dtype, *lead, COLUMNS, DEPTH))
    given = {
        ByBucket: (drawn(dtype, BINS, HEADS), buckets_of(ROWS, COLUMNS)), ByDistance: (drawn(dtype, 8, HEADS),),
        OneTable: (drawn(dtype, BINS), buckets_of(batch, ROWS, COLUMNS)),
    }  # fmt: skip
    return *qkv, *given[cls]


def launches(fast: Any, *given: Any, **options: Any) -> list[str]:
    return [launch.name for launch in fusegrad.explain(fast, *given, **options).directions["backward"].launches]


CASES = [
    (ByBucket, torch.float32, expanded), (ByDistance, torch.bfloat16, transposed_heads),
    (OneTable, torch.float32, None),
]  # fmt: skip
"""Each with a layout of the gradient of its result."""


@pytest.mark.parametrize(("cls", "dtype", "layout"), CASES)
def test_gradients_of_tables_beside_eager(cls: Any, dtype: torch.dtype, layout: Any) -> None:
    fast, given = fusegrad.compile(cls, backend="interpret"), arguments(cls, dtype)
    if cls is ByBucket:  # NaN is in its own bin alone, and bins without a place are zero
        given[4].clamp_(2, 3)[:, 5] = 3
        given[2].detach()[:, :, 5] = math.nan
    assert differences(fast.apply, cls.apply, given, layout=layout, neighbours=8) == []
    assert not [name for name in launches(fast, *given) if "scatter" in name or "aten" in name]


def test_nothing_of_the_size_of_scores_is_in_memory() -> None:
    heads = "bf16[2,16,4096,64]"
    found = fusegrad.explain(ByBucket, heads, heads, heads, "bf16[32,16]", "i64[4096,4096]", target="cuda:90")
    backward = found.directions["backward"]
    assert max(launch.bytes_written for launch in backward.launches) < 34e6
    assert len(backward.launches) == 4 and all(launch.kind == "triton" for launch in backward.launches)
    (source,) = (kernel.source for kernel in found.kernels if "bin_of" in kernel.source)
    assert source.count("tl.device_assert") == 2  # of the bias, and of what is added
