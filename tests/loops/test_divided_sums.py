"""Sums of a step over more elements than one program holds, divided among programs and added up by another kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loops.suite import FUNCTIONS
from torch import Tensor
from torch.autograd import Function

import fusegrad

ANY = Any
LONG = 5003
"""More than a program holds, and no block divides it."""


class Norms(Function):
    """h = a * h + x; the root of each state's mean square: what is stored needs the whole sum."""

    @staticmethod
    def forward(ctx: ANY, a: Tensor, x: Tensor) -> ANY:
        h, out = torch.zeros_like(x[0]), []
        for t in range(x.shape[0]):
            h = a[t] * h + x[t]
            out.append((h * h).mean(-1).sqrt())
        return torch.stack(out), h


class Shares(Function):
    """Each element's share of what all add up to in its step, and all of it in the end, on top of what was before."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, w: Tensor, before: Tensor) -> ANY:
        level, total, out = torch.ones_like(x[0]), before, []
        for t in range(x.shape[0]):
            level = level * torch.sigmoid(x[t])
            total = total + (level * w).sum(0)
            out.append(x[t] / (level.sum(-1, keepdim=True) + 2))
        return torch.stack(out), torch.tanh(total)


class Scaled(Function):
    """The next state waits for the sum: it is not divided."""

    @staticmethod
    def forward(ctx: ANY, a: Tensor, x: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[0]), []
        for t in range(x.shape[0]):
            h = torch.tanh(a[t] * h + x[t])
            h = h / (1 + h.abs().sum(-1, keepdim=True))
            out.append(h)
        return torch.stack(out)


class Largest(Function):
    """A sum and a maximum along the same axis: no part of the maximum is known to add up."""

    @staticmethod
    def forward(ctx: ANY, a: Tensor, x: Tensor) -> ANY:
        h, sums, tops = torch.zeros_like(x[0]), [], []
        for t in range(x.shape[0]):
            h = a[t] * h + x[t]
            sums.append(h.sum(-1))
            tops.append(h.amax(-1))
        return torch.stack(sums), torch.stack(tops)


class InTurn(Function):
    """Backwards; sums of sums, of both axes at once, and of one after the other."""

    @staticmethod
    def forward(ctx: ANY, a: Tensor, x: Tensor) -> ANY:
        h, both, lanes, out = torch.zeros_like(x[0]), [], [], x.new_zeros(x.shape[1])
        for t in reversed(range(x.shape[0])):
            h = a[t] * h + x[t]
            both.append(h.exp().sum((0, 1)).log())
            lanes.append((h * a[t]).sum(-1).sum())
            out = out + h.sum(-1)
        return torch.stack(both), torch.stack(lanes), out


def of_rows(steps: int, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.rand(steps, rows, width).to(dtype), torch.randn(steps, rows, width).to(dtype)


def of_shares(steps: int, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    _, x = of_rows(steps, rows, width, dtype)
    return x, torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)


CASES: dict[type[Function], tuple[Callable[..., tuple[Tensor, ...]], int]] = {
    Norms: (of_rows, 1), Shares: (of_shares, 1), Scaled: (of_rows, 0), Largest: (of_rows, 0), InTurn: (of_rows, 1),
}  # fmt: skip
"""By class: arguments, and the kernels at least that add up what programs have summed."""


def shared(report: Any) -> int:
    return sum("share their sums" in k.walk for k in report.kernels)


@pytest.mark.parametrize("cls", CASES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("rows, width, steps", [(2, LONG, 12), (3, LONG, 40), (70, 130, 18)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_beside_eager(cls: type[Function], rows: int, width: int, steps: int, dtype: torch.dtype) -> None:
    torch.manual_seed(steps)
    given, least = CASES[cls]
    args = given(steps, rows, width, dtype)
    fast = fusegrad.compile(cls, backend="interpret")
    found = fast.apply(*args)
    exact = cls.apply(*(a.double() for a in args))
    eager = cls.apply(*args)
    for ours, true, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, exact, eager)), strict=True):
        scale = true.abs().max()
        error, allowed = (ours.double() - true).abs().max() / scale, (theirs.double() - true).abs().max() / scale
        assert ours.dtype == theirs.dtype and error <= 2 * allowed + 32 * torch.finfo(dtype).eps, (error, allowed)
    if width == LONG:
        assert shared(fusegrad.explain(fast, *args, target="interpret")) == least


def selective_scan(batch: int, steps: int, width: int) -> tuple[type[Function], list[Tensor]]:
    cls = next(c for c in FUNCTIONS if c.name == "SelectiveScan").cls
    decay, like = -torch.rand(width, 16) - 0.1, torch.randn(batch, steps, width)
    return cls, [like, torch.rand_like(like), decay, *torch.randn(2, batch, steps, 16), torch.randn(width)]


def test_a_selective_scan_of_a_real_width() -> None:
    """Its backward needs two sums over the channels in each step, and one over the batch."""
    cls, args = selective_scan(4, 100, 1024)
    on_device = [torch.empty_like(a, device="meta").requires_grad_() for a in args]
    report = fusegrad.explain(fusegrad.compile(cls), *on_device, target="cuda:90")
    backward = report.directions["backward"]
    assert shared(report) == 1 and backward.launch_count == 3 and backward.moved < 1.12 * backward.minimal


@pytest.mark.parametrize("way", ["vmap", "jvp", "second order", "backward"])
def test_compositions_of_it(way: str) -> None:
    torch.manual_seed(0)
    cls, args = selective_scan(2, 11, 257)
    g, beside = torch.randn(2, 11, 257), [torch.randn_like(a) for a in args]
    plain = SimpleNamespace(save_for_backward=lambda *_: None)
    exact = _composed(partial(cls.forward, plain), way, [a.double() for a in (*args, g, *beside)])
    found = _composed(fusegrad.compile(cls, backend="interpret").apply, way, [*args, g, *beside])
    for true, ours in zip(exact, found, strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=1e-4, atol=1e-5 * true.abs().max().item())


def _composed(function: Callable[..., Any], way: str, values: list[Tensor]) -> tuple[Tensor, ...]:
    args, g, beside = tuple(values[:6]), values[6], tuple(values[7:])

    def gradients(*given: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vjp(function, *given)[1](g)

    if way == "vmap":
        lanes = [torch.stack([a, b.abs() * a.sign()]) for a, b in zip(args, beside, strict=True)]
        return torch.func.vmap(gradients)(*lanes)
    if way == "jvp":
        return torch.func.jvp(function, args, beside)
    if way == "second order":
        _, pull = torch.func.vjp(gradients, *args)
        return pull(tuple(b.tanh() for b in beside))
    return gradients(*args)
