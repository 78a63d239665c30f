"""Hardest pairs by `amax` and `amin`: gradients of equal elements, as eager shares them; no matrix in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import differences

Tensor = torch.Tensor
Call = Callable[..., Tensor]


def similar(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """Rows of nothing but -inf have no gradient."""
    return (a @ b.T).masked_fill(mask, -torch.inf).amax(1)


def late_interaction(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    s = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T
    return s.masked_fill(mask, -1e4).amax(-1).sum()


def hardest(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    d = ((a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * a @ b.T).clamp_min(1e-6).sqrt()
    return F.relu(d.masked_fill(~mask, 0.0).amax(1) - d.masked_fill(mask, 1e6).amin(1) + 0.3).mean()


def both_ways(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    s = a @ b.T
    return s.amax(1, keepdim=True).exp().sum() - s.amin(0).sum() + (s * mask).amax(0).sum()


def relative(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """A softmax by hand, through the maximum of which a gradient goes as well."""
    s = (a @ b.T).masked_fill(mask & ~mask.all(1, keepdim=True), -1e4)
    z = torch.exp(s - s.amax(1, keepdim=True))
    return (z / z.sum(1, keepdim=True)) @ b


LARGE = ("bf16[4096,64]", "bf16[4096,64]", "b1[4096,4096]")
CALLS: dict[str, Call] = {f.__name__: f for f in (similar, late_interaction, hardest, both_ways, relative)}


def arguments(n: int, m: int, dtype: torch.dtype) -> list[Tensor]:
    """Some rows are there twice, or three times, and are the nearest; of one all is masked."""
    gen = torch.Generator().manual_seed(n)
    a, b = torch.randn(n, 16, generator=gen), torch.randn(m, 16, generator=gen)
    b[5], b[m - 1], b[2] = b[11], b[0], b[0]
    a[3], a[4] = 3 * b[11], 3 * b[0]
    mask = torch.rand(m, generator=gen).expand(n, m) > 0.7
    mask = mask.clone()
    mask[7], mask[3:5] = True, False
    return [a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_(), mask]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_beside_eager(name: str, dtype: torch.dtype) -> None:
    fast = fusegrad.compile(CALLS[name], backend="interpret", fullgraph=True)
    assert not differences(fast, CALLS[name], arguments(37, 53, dtype))


@pytest.mark.parametrize("name", CALLS)
def test_no_matrix_is_in_memory(name: str) -> None:
    found = fusegrad.explain(fusegrad.compile(CALLS[name]), *LARGE)
    for report in found.directions.values():
        assert {launch.kind for launch in report.launches} == {"triton"}
        assert report.memory is not None and report.memory.own < 4096 * 4096
    assert found.saved_bytes < 2 * 4096 * 4096


def test_a_stream_in_parts_counts_in_the_best() -> None:
    """Each part has its extreme, and how often that is there; of the others' nothing is added."""
    found = fusegrad.explain(fusegrad.compile(similar), *LARGE, target="cuda:90")
    merged = next(k for k in found.kernels if k.name.endswith("_merged") and "minima" in k.source)
    assert "tl.sum(tl.where(" in merged.source
