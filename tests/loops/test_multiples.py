"""Loops that have a step for so much of a size each: by two, in chunks, with a condition that comes round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from loops.fuzz_loops import graphs_of
from torch import Tensor
from torch.autograd import Function

import fusegrad
from fusegrad.tracer.loops.node import has_loop
from fusegrad.tracer.loops.turns.multiples import Multiples

ANY = Any


class ByTwo(Function):
    """A step reads two rows; what is left over of an odd number is not read."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, w: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[0]), list[Tensor]()
        for t in range(0, x.shape[0] - 1, 2):
            h = torch.tanh(w * h + x[t] * x[t + 1])
            out.append(h)
        states = torch.stack(out)
        ctx.save_for_backward(x, w, states)
        return states

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        x, w, states = ctx.saved_tensors
        gh, gw, gx = torch.zeros_like(g[0]), torch.zeros_like(w), torch.zeros_like(x)
        for t in range(states.shape[0] - 1, -1, -1):
            gz = (gh + g[t]) * (1 - states[t] ** 2)
            if t > 0:
                gw = gw + (gz * states[t - 1]).sum(0)
            gx[2 * t] = gz * x[2 * t + 1]
            gx[2 * t + 1] = gz * x[2 * t]
            gh = gz * w
        return gx, gw


class InChunks(Function):
    """Sums within chunks of four rows, on top of what the chunks before hand on."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, w: Tensor) -> Tensor:
        chunks = x.view(x.shape[0] // 4, 4, *x.shape[1:])
        state, out = torch.zeros_like(x[0]), list[Tensor]()
        for chunk in chunks:
            out.append(torch.cumsum(chunk, 0) + state)
            state = state * w + chunk.sum(0)
        ctx.save_for_backward(x, w)
        return torch.stack(out).reshape(x.shape)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        x, w = ctx.saved_tensors
        steps = x.shape[0] // 4
        states = [torch.zeros_like(x[0])]
        for i in range(steps - 1):
            states.append(states[-1] * w + x[4 * i : 4 * i + 4].sum(0))
        carry, gw, gx = torch.zeros_like(x[0]), torch.zeros_like(w), torch.empty_like(x)
        for i in reversed(range(steps)):
            own = g[4 * i : 4 * i + 4]
            gx[4 * i : 4 * i + 4] = own.flip(0).cumsum(0).flip(0) + carry
            gw = gw + (carry * states[i]).sum(0)
            carry = carry * w + own.sum(0)
        return gx, gw


class EveryThird(Function):
    """A condition that comes round."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, w: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[0]), list[Tensor]()
        for t in range(x.shape[0]):
            if t % 3 == 0:
                h = h * w
            h = h + x[t].sin()
            out.append(h)
        ctx.save_for_backward(x, w, *out)
        return torch.stack(out)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        x, w, *states = ctx.saved_tensors
        gh, gw, gx = torch.zeros_like(g[0]), torch.zeros_like(w), list[Tensor]()
        for t in range(len(states) - 1, -1, -1):
            gh = gh + g[t]
            gx.append(gh * x[t].cos())
            if t % 3 == 0:
                gw = gw + ((gh * states[t - 1]).sum(0) if t else 0)
                gh = gh * w
        return torch.stack(gx[::-1]), gw


def arguments(steps: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(steps)
    return torch.randn(steps, 2, 3, dtype=dtype, requires_grad=True), torch.rand(3, dtype=dtype, requires_grad=True)


def outcome(cls: Any, args: Sequence[Tensor]) -> list[Tensor]:
    out = cls.apply(*args)
    return [out, *torch.autograd.grad(out, args, torch.cos(out.detach()))]


LENGTHS = {ByTwo: ((40, 64, 22), (41, 31)), InChunks: ((40, 64, 400), ()), EveryThird: ((42, 60, 90), (43, 31))}
"""Of each Function lengths that one graph serves, and such as have another one."""


@pytest.mark.parametrize("cls", LENGTHS)
def test_one_graph_serves_all_such_lengths(cls: Any) -> None:
    fast, (alike, others) = fusegrad.compile(cls), LENGTHS[cls]
    for steps in (*alike, *alike):
        args = arguments(steps)
        for a, b in zip(outcome(fast, args), outcome(cls, args), strict=True):
            assert torch.equal(a, b)
    assert [has_loop(g) for g in graphs_of(fast)] == [True, True]
    assert [fast._fusegrad.ledger.records[m].reason for m in ("forward", "backward")] == [None, None]
    for steps in (*others, *alike):
        args = arguments(steps)
        for a, b in zip(outcome(fast, args), outcome(cls, args), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("cls", LENGTHS)
def test_kernels(cls: Any) -> None:
    args = arguments(LENGTHS[cls][0][0], torch.float64)
    with fusegrad.config.patch(backend="interpret", disable="patience"):
        found = outcome(fusegrad.compile(cls), args)
    for a, b in zip(found, outcome(cls, args), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("cls", [ByTwo, EveryThird])
def test_transforms(cls: Any) -> None:
    x, w = (a.detach() for a in arguments(39, torch.float64))
    fast = fusegrad.compile(cls)
    xs = torch.stack([x, 0.9 * x])
    torch.testing.assert_close(torch.func.vmap(fast.apply, (0, None))(xs, w)[1], cls.apply(0.9 * x, w))
    loss = lambda x: fast.apply(x, w).sin().sum()  # noqa: E731
    tangent = torch.func.jvp(loss, (x,), (x.cos(),))[1]
    torch.testing.assert_close(tangent, (torch.func.grad(loss)(x) * x.cos()).sum())


def test_numbers_of_steps() -> None:
    """A size of 4 n + 3: what is 8 n + 5, and what is n."""
    multiples = Multiples(4, 3)
    for steps in (1, 7):
        size = multiples.size(steps)
        assert multiples.value(8, 5, size) == 8 * steps + 5
        assert multiples.value(1, 0, size) == steps
        assert multiples.value(6, -1, size) == 6 * steps - 1
