"""Loops over time as users write them, step by step, at the sizes that their kernels are compiled for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .suite import Case


class GatedRecurrence(Function):
    """h = a[t] * h + x[t]"""

    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor) -> Tensor:
        h, hs = torch.zeros_like(x[0]), []
        for t in range(x.shape[0]):
            h = a[t] * h + x[t]
            hs.append(h)
        out = torch.stack(hs)
        ctx.save_for_backward(a, out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, out = ctx.saved_tensors
        gh, ga, gx = torch.zeros_like(g[0]), [], []
        for t in reversed(range(g.shape[0])):
            gh = gh + g[t]
            gx.append(gh)
            ga.append(gh * (out[t - 1] if t > 0 else torch.zeros_like(gh)))
            gh = gh * a[t]
        return torch.stack(ga[::-1]), torch.stack(gx[::-1])


class MovingAverage(Function):
    """m = beta * m + (1 - beta) * x[t], from the first value on"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, beta: float) -> Tensor:
        ctx.beta = beta
        m = x[0]
        out = [m]
        for t in range(1, len(x)):
            m = beta * m + (1 - beta) * x[t]
            out.append(m)
        return torch.stack(out)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        beta, carry, grads = ctx.beta, torch.zeros_like(g[0]), []
        for t in range(g.shape[0] - 1, 0, -1):
            carry = carry + g[t]
            grads.append((1 - beta) * carry)
            carry = beta * carry
        grads.append(carry + g[0])
        return torch.stack(grads[::-1]), None


class SelectiveScan(Function):
    """States that decay by what is read at each step, as in Mamba"""

    @staticmethod
    def forward(ctx: Any, u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        h, ys, hs = u.new_zeros(u.shape[0], *a.shape), [], []
        for t in range(u.shape[1]):
            h = torch.exp(delta[:, t, :, None] * a) * h + (delta[:, t] * u[:, t])[..., None] * b[:, t, None]
            ys.append((h * c[:, t, None]).sum(-1))
            hs.append(h)
        ctx.save_for_backward(u, delta, a, b, c, torch.stack(hs))
        return torch.stack(ys, dim=1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        u, delta, a, b, c, hs = ctx.saved_tensors
        gh, ga = torch.zeros_like(hs[0]), torch.zeros_like(hs[0])
        gu, gdelta, gb, gc = [], [], [], []
        for t in reversed(range(u.shape[1])):
            before = hs[t - 1] if t > 0 else torch.zeros_like(hs[0])
            decay = torch.exp(delta[:, t, :, None] * a)
            gh = gh + g[:, t, :, None] * c[:, t, None]
            gc.append((g[:, t, :, None] * hs[t]).sum(1))
            power = gh * before * decay
            ga = ga + power * delta[:, t, :, None]
            into = (gh * b[:, t, None]).sum(-1)
            gb.append((gh * (delta[:, t] * u[:, t])[..., None]).sum(1))
            gu.append(into * delta[:, t])
            gdelta.append((power * a).sum(-1) + into * u[:, t])
            gh = gh * decay
        grads = [torch.stack(part[::-1], dim=1) for part in (gu, gdelta, gb, gc)]
        return grads[0], grads[1], ga.sum(0), grads[2], grads[3]


class RNN(Function):
    """h = tanh(x[t] @ w.T + h @ u.T)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, u: Tensor, h: Tensor) -> Tensor:
        h0, hs = h, []
        for xt in x:
            h = torch.tanh(xt @ w.t() + h @ u.t())
            hs.append(h)
        out = torch.stack(hs)
        ctx.save_for_backward(x, w, u, h0, out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, u, h0, out = ctx.saved_tensors
        gw, gu, gh, gx = torch.zeros_like(w), torch.zeros_like(u), torch.zeros_like(h0), []
        for t in reversed(range(x.shape[0])):
            gz = (gh + g[t]) * (1 - out[t] ** 2)
            gw = gw + gz.t() @ x[t]
            gu = gu + gz.t() @ (out[t - 1] if t > 0 else h0)
            gx.append(gz @ w)
            gh = gz @ u
        return torch.stack(gx[::-1]), gw, gu, gh


STEPS, WIDTH, STATES = 2048, 1024, 16
_CASES = [
    ("gated recurrence", Case(GatedRecurrence, f"{STEPS},32,{WIDTH}", (f"f32[{STEPS},32,{WIDTH}]",) * 2)),
    ("moving average", Case(MovingAverage, f"{STEPS},{32 * WIDTH}", (f"f32[{STEPS},{32 * WIDTH}]", 0.9))),
    ("selective scan", Case(SelectiveScan, f"4,{STEPS},{WIDTH},{STATES}",
     (*(f"f32[4,{STEPS},{WIDTH}]",) * 2, f"f32[{WIDTH},{STATES}]", *(f"f32[4,{STEPS},{STATES}]",) * 2))),
    ("RNN", Case(RNN, f"{STEPS},64,128",
     (f"f32[{STEPS},64,128]", "f32[128,128]", "f32[128,128]", "f32[64,128]"))),
]  # fmt: skip
LOOPS = {case.name: (words, case) for words, case in _CASES}
"""By name: what it is in words, and the case."""
