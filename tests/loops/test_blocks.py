"""Loops that write a buffer block by block: side by side, one place long, with gaps, one over another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops.fuzz_loops import graphs_of
from torch import Tensor
from torch.autograd import Function

import fusegrad
from fusegrad.tracer.loops.node import has_loop


def one_place(x: Tensor) -> Tensor:
    out, h = torch.empty_like(x), torch.zeros_like(x[:1])
    for t in range(x.shape[0]):
        h = 0.9 * h + x[t : t + 1]
        out[t : t + 1] = h
    return out


def of_other_axes(x: Tensor) -> Tensor:
    """Time is the last axis; two values of each step, side by side."""
    out, h = x.new_zeros(3, 2 * x.shape[0]), torch.zeros_like(x[0])
    for t in range(x.shape[0]):
        h = 0.9 * h + x[t]
        out[:, 2 * t : 2 * t + 2] = torch.stack([h, h.sin()], 1)
    return out


def read_again(x: Tensor) -> Tensor:
    """A step reads the block that the one before has written."""
    out = x.new_zeros(2 * x.shape[0], 3)
    out[0:2] = 1.0
    for t in range(1, x.shape[0]):
        out[2 * t : 2 * t + 2] = out[2 * t - 2 : 2 * t] * 0.9 + x[t]
    return out


def with_gaps(x: Tensor) -> Tensor:
    out = x.new_ones(3 * x.shape[0], 3)
    for t in range(x.shape[0]):
        out[3 * t : 3 * t + 2] = x[t].sin().expand(2, 3)
    return out


def one_over_another(x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0] + 3, 3)
    for t in range(x.shape[0]):
        out[t : t + 4] = out[t : t + 4] * 0.5 + x[t]
    return out


def twice(x: Tensor) -> Tensor:
    """Written, read as a whole, and written again."""
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        out[t : t + 1] = x[t : t + 1].sin()
    total = out.sum(0)
    for t in range(x.shape[0]):
        out[t : t + 1] = out[t : t + 1] + total
    return out


BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (one_place, of_other_axes, read_again, with_gaps, one_over_another, twice)
}


def compiled(body: Callable[[Tensor], Tensor]) -> Any:
    class Blocks(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return body(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise AssertionError

    return fusegrad.compile(Blocks)


@pytest.mark.parametrize("name", BODIES)
def test_values(name: str) -> None:
    fast = compiled(BODIES[name])
    for steps in (12, 20, 31, 3):
        x = torch.randn(steps, 3, generator=torch.Generator().manual_seed(steps)).requires_grad_()
        found, eager = fast.apply(x), BODIES[name](x)
        assert torch.equal(found, eager)
        assert found.stride() == eager.stride()


@pytest.mark.parametrize("name", ["one_place", "of_other_axes", "read_again"])
def test_these_are_one_loop(name: str) -> None:
    fast = compiled(BODIES[name])
    for steps in (12, 20, 31):
        fast.apply(torch.randn(steps, 3, requires_grad=True))
    assert [has_loop(g) for g in graphs_of(fast)] == [True]
