"""Rows that are reduced and of which halves, thirds or neighbours are read as well: each element is read once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import fusegrad


class Gated(Function):
    """RMSNorm, and one half of the row times the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, w, rstd)
        a, b = (x * rstd * w).chunk(2, -1)
        return (a.sigmoid() * b).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, rstd = ctx.saved_tensors
        y = x * rstd
        a, b = (y * w).chunk(2, -1)
        s = a.sigmoid()
        gz = torch.cat([g * b * s * (1 - s), g * s], -1)
        gy = gz * w
        dx = rstd * (gy - y * (gy * y).mean(-1, keepdim=True))
        return dx.to(x.dtype), (gz * y).sum(0).to(w.dtype)


class Turned(Function):
    """RMSNorm, and a rotation of neighbours."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angle: Tensor) -> Tensor:
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, angle, rstd)
        a, b = (x * rstd)[..., ::2], (x * rstd)[..., 1::2]
        cos, sin = angle.cos(), angle.sin()
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, angle, rstd = ctx.saved_tensors
        cos, sin = angle.cos(), angle.sin()
        a, b = g.float().unflatten(-1, (-1, 2)).unbind(-1)
        gy = torch.stack([a * cos + b * sin, b * cos - a * sin], -1).flatten(-2)
        y = x * rstd
        return (rstd * (gy - y * (gy * y).mean(-1, keepdim=True))).to(x.dtype), None


class Thirds(Function):
    """Softmax over rows of three parts that are multiplied with one another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        p = (x * scale).softmax(-1)
        ctx.save_for_backward(x, scale)
        a, b, c = p.unflatten(-1, (3, -1)).unbind(-2)
        return a * b + c

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        p = (x * scale).softmax(-1)
        a, b, _ = p.unflatten(-1, (3, -1)).unbind(-2)
        gp = torch.stack([g * b, g * a, g], -2).flatten(-2)
        return p * (gp - (gp * p).sum(-1, keepdim=True)) * scale, None


CASES = {"halves": (Gated, 1), "neighbours": (Turned, 0.5), "thirds": (Thirds, 0)}


def arguments(share: float, rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    other = torch.randn(int(width * share) or 1, device=device)
    return [torch.randn(rows, width, device=device).to(dtype).requires_grad_(), other.to(dtype).requires_grad_()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_beside_eager(name: str, dtype: torch.dtype) -> None:
    cls, share = CASES[name]
    fast = fusegrad.compile(cls, backend="interpret", fullgraph=True)
    for rows, width in ((5, 12), (37, 96), (3, 6)):
        torch.manual_seed(rows)
        args = arguments(share, rows, width, dtype)
        ends = [f.apply(*args) for f in (fast, cls)]
        g = torch.randn_like(ends[0])
        grads = [torch.autograd.grad(end, args, g, allow_unused=True) for end in ends]
        close = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(ends[0], ends[1], rtol=close, atol=close)
        torch.testing.assert_close(grads[0], grads[1], rtol=close, atol=close)


@pytest.mark.parametrize("width", [192, 12288])
@pytest.mark.parametrize("name", CASES)
def test_each_element_is_read_once(name: str, width: int) -> None:
    cls, share = CASES[name]
    args = arguments(share, 4096, width, torch.bfloat16, "meta")
    found = fusegrad.explain(fusegrad.compile(cls), *args, target="cuda:90")
    for report in found.directions.values():
        assert report.launch_count == 1
        assert report.moved <= 1.06 * report.minimal
