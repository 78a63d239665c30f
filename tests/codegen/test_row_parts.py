"""Rows that are reduced and of which halves, thirds or neighbours are read as well: each element is read once."""

from __future__ import annotations

from collections.abc import Callable
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


def halves(x: Tensor) -> Tensor:
    """The rotary embedding of halves, whose backward adds up what the slices give back."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + halves(x) * sin


def weighted_channels(x: Tensor, *_: Tensor) -> Tensor:
    return 0.3 * x[:, 0] + 0.6 * x[:, 2].sin() + x[:, 1]


@pytest.mark.parametrize("body", [rotated, weighted_channels])
def test_slices_that_part_an_axis(body: Callable[..., Tensor]) -> None:
    fast = fusegrad.compile(body, backend="interpret")
    for n in (6, 8, 5, 4):
        x, *angles = (torch.randn(2, 3, n, dtype=torch.float64, requires_grad=True) for _ in range(3))
        if body is rotated and n % 2:
            angles = [a.detach() for a in angles]
        results = [f(x, *angles) for f in (fast, body)]
        assert torch.equal(*results)
        assert torch.equal(*(torch.autograd.grad(r.cos().sum(), x)[0] for r in results))


def test_slices_that_part_an_axis_are_read_once() -> None:
    x = torch.empty(4, 32, 2048, 128, device="meta", dtype=torch.bfloat16, requires_grad=True)
    angles = [torch.empty(2048, 128, device="meta", dtype=torch.bfloat16) for _ in range(2)]
    found = fusegrad.explain(fusegrad.compile(rotated), x, *angles, target="cuda:90")
    for report in found.directions.values():
        assert report.launch_count == 1 and report.moved <= 1.02 * report.minimal


def test_minus_zero_of_a_slice_is_added_to_zero() -> None:
    x = torch.zeros(3, 4, requires_grad=True)
    fast = fusegrad.compile(lambda x: torch.cat([x[:, 2:] * -1.0, x[:, :2]], 1), backend="interpret")
    (grad,) = torch.autograd.grad(fast(x), x, torch.zeros(3, 4))
    assert not grad.signbit().any()
