"""RMSNorm into SwiGLU: second order in a bounded number of kernels, and a batch that costs what its rows cost."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from compose.composing import close
from torch.autograd import Function
from torch.func import hessian, vjp, vmap

import fusegrad
from fusegrad.examples.demo.functions import SwiGLU
from fusegrad.runtime.execution.group import GroupRunner
from fusegrad.runtime.values.sizes import number


class RMSNorm(Function):
    """Saves its inputs alone, so that eager's own second derivative is whole."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        x_hat, scaled = x * rstd, g * weight
        return rstd * (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True)), (g * x_hat).sum(0)


FAST = {
    backend: [fusegrad.compile(cls, backend=backend) for cls in (RMSNorm, SwiGLU)]
    for backend in ("reference", "interpret")
}


def loss_of(norm, glu):
    def loss(x, weight):
        return glu.apply(*norm.apply(x, weight).chunk(2, -1)).square().sum()

    return loss


def sample(*shape):
    numbers = torch.Generator().manual_seed(2)
    x = torch.randn(shape, generator=numbers, dtype=torch.float64)
    return x, torch.rand(shape[-1], generator=numbers, dtype=torch.float64) + 0.5


@dataclass
class Cost:
    """What the plans launched."""

    launches: int = 0
    moved: int = 0
    names: list[str] = field(default_factory=list)


def cost_of(monkeypatch, run) -> Cost:
    """Kernels launched by a call, and the bytes that they read and write by their own account."""
    found, plain = Cost(), GroupRunner.__call__

    def watched(self, inputs, sizes, key):
        results = plain(self, inputs, sizes, key)
        for kernel in self.bound[key].kernels.kernels:
            found.launches += 1
            found.moved += sum(number(b, sizes) for b in (*kernel.reads.values(), *kernel.writes.values()))
            found.names.append(kernel.name)
        return results

    with monkeypatch.context() as patched:
        patched.setattr(GroupRunner, "__call__", watched)
        run()
    return found


@pytest.mark.parametrize("backend", FAST)
def test_the_hessian_is_eagers(backend) -> None:
    x, weight = sample(2, 4)
    mine = hessian(loss_of(*FAST[backend]), (0, 1))(x, weight)
    close(mine, torch.autograd.functional.hessian(loss_of(RMSNorm, SwiGLU), (x, weight)))


KERNELS = 8  # one per direction of each Function, and per derivative of it; as many over a batch


def test_the_hessian_takes_the_same_kernels_for_every_size_and_batch(monkeypatch) -> None:
    second = hessian(loss_of(*FAST["interpret"]), (0, 1))
    counts = set()
    for rows in (2, 5):
        args = sample(rows, 4)
        second(*args)
        counts.add(cost_of(monkeypatch, lambda args=args: second(*args)).launches)
    assert len(counts) == 1 and counts.pop() <= KERNELS
    batched, counts = vmap(second, (0, None)), set()
    for lanes in (2, 7):
        args = sample(lanes, 2, 4)
        batched(*args)
        counts.add(cost_of(monkeypatch, lambda args=args: batched(*args)).launches)
    assert len(counts) == 1 and counts.pop() <= KERNELS


def forward(f):
    return lambda x, w: f(x, w)


def backward(f):
    def pull(x, w):
        y, pulled = vjp(f, x, w)
        return pulled(torch.ones_like(y))

    return pull


@pytest.mark.parametrize("direction", [forward, backward])
def test_a_new_axis_costs_what_more_rows_cost(direction, monkeypatch) -> None:
    norm = FAST["interpret"][0].apply
    x, weight = (t.float() for t in sample(4, 16, 64))
    over_axis = direction(vmap(norm, (0, None)))
    over_rows = direction(norm)
    costs = []
    for run, given in ((over_axis, x), (over_rows, x.flatten(0, 1))):
        run(given, weight)
        costs.append(cost_of(monkeypatch, lambda run=run, given=given: run(given, weight)))
    axis, rows = costs
    assert axis.launches <= rows.launches
    assert axis.moved <= rows.moved
