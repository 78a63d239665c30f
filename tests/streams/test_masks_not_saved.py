"""Classes that save probabilities and not what masked them: p is made again in backward, of a copy of the mask."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import differences, gradients_for, run

Tensor = torch.Tensor
INF = float("inf")


class Masked(Function):
    """The textbook: p is all that backward needs of the scores."""

    @staticmethod
    def scores(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return q @ k.mT * q.shape[-1] ** -0.5 + mask.to(q.dtype)

    @classmethod
    def forward(cls, ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        p = torch.softmax(cls.scores(q, k, mask), -1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (g,) = gradients
        q, k, v, p = ctx.saved_tensors
        dp = g @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return ds @ k, ds.mT @ q, p.mT @ g, None


class Filled(Masked):
    @staticmethod
    def scores(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(mask, -1e9)


class Sloped(Masked):
    """Slopes make a bias that is as large as the scores."""

    @staticmethod
    def scores(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        distance = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
        s = q @ k.mT * q.shape[-1] ** -0.5 + (mask[:, None, None] * distance).to(q.dtype)
        return s.masked_fill(distance > 0, -INF)


N = 37
MASKS: dict[type[Masked], Callable[[], Tensor]] = {
    Masked: lambda: torch.zeros(N, N).masked_fill(torch.ones(N, N).triu(1) > 0, -INF),
    Filled: lambda: torch.arange(N) >= torch.tensor([N, 20])[:, None, None, None],
    Sloped: lambda: torch.tensor([0.5, 0.25, 0.125]),
}


def arguments(cls: type[Masked], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [*(torch.randn(2, 3, N, 16, generator=draw).to(dtype).requires_grad_() for _ in "qkv"), MASKS[cls]()]


@pytest.mark.parametrize("cls", MASKS)
def test_a_mask_that_changes_after_forward_changes_no_gradient(cls: type[Masked]) -> None:
    """The first call, and one that the inline cache knows."""
    fast = fusegrad.compile(cls, backend="interpret", fullgraph=True)
    made = arguments(cls)
    for call in (fast.apply, fast.apply):
        q, k, v, mask = (a.detach().clone().requires_grad_(a.requires_grad) for a in made)
        out = call(q, k, v, mask)
        given = gradients_for([out])
        mask.zero_()
        found = torch.autograd.grad(out, (q, k, v), given)
        expected = run(cls.apply, made, given).gradients
        for ours, theirs in zip(found, expected[:3], strict=True):
            assert theirs is not None and (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls", MASKS)
def test_beside_eager(cls: type[Masked], dtype: torch.dtype) -> None:
    fast = fusegrad.compile(cls, backend="interpret", fullgraph=True)
    assert not differences(fast.apply, cls.apply, arguments(cls, dtype))


@pytest.mark.parametrize(("cls", "mask"), [(Masked, "bf16[4096,4096]"), (Sloped, "f32[32]")])
def test_no_probabilities_are_saved(cls: type[Masked], mask: str) -> None:
    explained = fusegrad.explain(fusegrad.compile(cls), *["bf16[4,32,4096,64]"] * 3, mask, target="cuda:90")
    for direction, launches in (("forward", 1), ("backward", 2)):
        report = explained.directions[direction]
        assert len(report.launches) == launches and not report.reasons
        assert any(": never in memory" in line for line in report.products)
    assert "computed again" in str(explained)


class Drawn(Masked):
    """What is dropped is drawn like p, and saved."""

    @classmethod
    def forward(cls, ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = torch.softmax(q @ k.mT, -1)
        keep = torch.rand_like(p) > 0.25
        ctx.save_for_backward(q, k, v, p, keep)
        return (p * keep / 0.75) @ v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (g,) = gradients
        q, k, v, p, keep = ctx.saved_tensors
        dp = (g @ v.mT) * keep / 0.75
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        return ds @ k, ds.mT @ q, (p * keep / 0.75).mT @ g


def test_numbers_drawn_like_probabilities_need_none_in_memory() -> None:
    fast, made = fusegrad.compile(Drawn, backend="interpret", fullgraph=True), arguments(Masked)[:3]
    results = []
    for call in (Drawn.apply, fast.apply):
        torch.manual_seed(3)
        results.append(run(call, made))
    for (name, ours), (_, theirs) in zip(results[1].named(), results[0].named(), strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max(), name
    explained = fusegrad.explain(fusegrad.compile(Drawn), *["bf16[4,32,4096,64]"] * 3, target="cuda:90")
    for report in explained.directions.values():
        assert any(": never in memory" in line for line in report.products)
