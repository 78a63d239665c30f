"""Losses over the pairs of a batch: backward walks what is made of x @ x.T once, not by rows and by columns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import Function

import fusegrad


class SupCon(Function):
    """Supervised contrastive loss of rows of length one, whose matmuls are in the dtype of the rows."""

    @staticmethod
    def forward(ctx, x, labels, temperature):
        eye = torch.eye(x.shape[0], dtype=torch.bool, device=x.device)
        alike = (labels[:, None] == labels[None]) & ~eye
        s = ((x @ x.T).float() / temperature).masked_fill(eye, float("-inf"))
        lse, count = torch.logsumexp(s, 1), alike.sum(1).clamp_min(1)
        ctx.save_for_backward(x, labels, lse, count)
        ctx.temperature = temperature
        return (lse - torch.where(alike, s, 0).sum(1) / count).mean()

    @staticmethod
    def backward(ctx, g):
        x, labels, lse, count = ctx.saved_tensors
        eye = torch.eye(x.shape[0], dtype=torch.bool, device=x.device)
        alike = (labels[:, None] == labels[None]) & ~eye
        p = torch.exp((x @ x.T).float() / ctx.temperature - lse[:, None]).masked_fill(eye, 0)
        d = ((p - torch.where(alike, 1 / count[:, None], 0)) * (g / x.shape[0] / ctx.temperature)).to(x.dtype)
        return d @ x + d.T @ x, None, None


def of_kernel_means(x, width):
    """What a plain function of squared distances makes of them: autograd sums in both directions."""
    n = (x * x).sum(1)
    return torch.exp((2 * x @ x.T - n[:, None] - n[None]) / width).mean()


def results(function, x, *more):
    loss = function(x, *more)
    return [loss, *torch.autograd.grad(loss, x)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 4e-2), (torch.float16, 6e-3)])
@pytest.mark.parametrize("rows", [37, 70])
def test_values(dtype: torch.dtype, tolerance: float, rows: int) -> None:
    gen = torch.Generator().manual_seed(5)
    x = F.normalize(torch.randn(rows, 16, generator=gen), dim=1).to(dtype).requires_grad_()
    exact, labels = x.detach().double().requires_grad_(), torch.randint(0, 4, (rows,), generator=gen)
    for function, more in ((SupCon, (labels, 0.5)), (of_kernel_means, (8.0,))):
        fast = fusegrad.compile(function, backend="interpret")
        ours = results(fast.apply if function is SupCon else fast, x, *more)
        right = results(function.apply if function is SupCon else function, exact, *more)
        for own, other in zip(ours, right, strict=True):
            assert (own.double() - other).abs().max() <= tolerance * max(other.abs().max().item(), 1e-2)


@pytest.mark.parametrize(("dtype", "depth"), [("bf16", 128), ("f32", 64)])
def test_one_walk_in_backward(dtype: str, depth: int) -> None:
    arguments = (f"{dtype}[4096, {depth}]", "i64[4096]", 0.5)
    backward = fusegrad.explain(fusegrad.compile(SupCon), *arguments, target="cuda:90").directions["backward"]
    assert ["never in memory" in p for p in backward.products] == [True]
    assert [launch.kind for launch in backward.launches if "tl.dot" in launch.source] == ["triton"]
