"""Kernels whose programs wait for one another, or count one another: as many processes run their programs at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import fusegrad
from fusegrad.codegen.emit.loops import look_back
from fusegrad.codegen.emit.reductions import pieces

sys.path.insert(0, str(Path(__file__).parent))

from at_once import Deal, from_the_last, in_processes, in_turn, programs_at_once, shuffled

STEPS = 2100
"""Chunks of 256 steps, by one program each; the last is not full."""


class Recurrence(Function):
    """h = a[t] * h + x[t], with its backward from the last step to the first."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, a: Tensor, x: Tensor) -> Tensor:
        first, out = h, []
        for t in range(x.shape[0]):
            h = a[t] * h + x[t]
            out.append(h)
        states = torch.stack(out)
        ctx.save_for_backward(first, a, states)
        return states

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        h, a, states = ctx.saved_tensors
        carry, found = torch.zeros_like(h), []
        for t in reversed(range(g.shape[0])):
            found.append(carry + g[t])
            carry = found[-1] * a[t]
        gx = torch.stack(found[::-1])
        return carry, gx * torch.cat([h[None], states[:-1]]), gx


class Columns(Function):
    """A softmax over rows of which there are many more than columns: programs reduce pieces of a column."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.softmax(x, 0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (g - (g * y).sum(0))


class Sums(Function):
    """The gradient of a weight is a sum over rows: programs add up some each, the last to arrive all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.sin(x) * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w * torch.cos(x), (g * torch.sin(x)).sum(0)


def given(cls: type) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    if cls is Recurrence:
        return torch.randn(3), torch.rand(STEPS, 3), torch.randn(STEPS, 3)
    if cls is Columns:
        return (torch.randn(4099, 7),)
    return torch.randn(517, 70), torch.randn(70)


def results(apply: Any, values: tuple[Tensor, ...]) -> list[Tensor]:
    values = tuple(v.detach().requires_grad_() for v in values)
    out = apply(*values)
    return [out.detach(), *torch.autograd.grad(out, values, torch.cos(out.detach()))]


ORDERS: dict[str, tuple[Deal, tuple[int, ...]]] = {
    "in turn": (in_turn(3), ()),
    "the first one late": (in_turn(3), (0,)),
    "one in the middle late": (in_turn(4), (2, 3)),
}
"""In which programs with smaller numbers have begun, as on a GPU."""
OUT_OF_ORDER: dict[str, Deal] = {"from the last": from_the_last(3), "shuffled": shuffled(3, 1)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cls", [Recurrence, Columns, Sums])
def test_the_same_bits_as_one_after_the_other(cls: Any, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits finds what was told, and the words that programs count in are zero again for the next launch."""
    monkeypatch.setattr(pieces, "PATIENCE_OF_INTERPRETER", 30)
    deal, late = ORDERS[order]
    fast, values = fusegrad.compile(cls, backend="interpret"), given(cls)
    alone = results(fast.apply, values)
    for _ in range(2):
        with programs_at_once(deal, late) as seen:
            found = results(fast.apply, values)
        assert any(programs > 2 for _, programs in seen.launches)
        assert all(torch.equal(x, y) for x, y in zip(alone, found, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(alone, results(fast.apply, values), strict=True))


@pytest.mark.parametrize("order", OUT_OF_ORDER)
@pytest.mark.parametrize("cls", [Recurrence, Columns, Sums])
def test_no_order_is_taken_for_granted(cls: Any, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has waited in vain computes it alone, as near to eager; the next launch is as the first."""
    monkeypatch.setattr(look_back, "PATIENCE", 20)
    monkeypatch.setattr(pieces, "PATIENCE_OF_INTERPRETER", 20)
    fast, values = fusegrad.compile(cls, backend="interpret"), given(cls)
    alone, eager = results(fast.apply, values), results(cls.apply, values)
    with programs_at_once(OUT_OF_ORDER[order]):
        found = results(fast.apply, values)
    for x, y in zip(found, eager, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(x, y) for x, y in zip(alone, results(fast.apply, values), strict=True))


def test_a_program_that_fails_is_seen() -> None:
    """The tool: an exception in one of the processes is one here."""

    def work(hand: Sequence[int]) -> None:
        assert 1 not in hand, "program 1 failed"

    with pytest.raises(AssertionError, match="program 1 failed"):
        in_processes(work, in_turn(2)(3))


def test_memory_that_is_not_shared_would_be_seen() -> None:
    """The tool: what programs write in other processes is what the caller finds."""
    fast, values = fusegrad.compile(Sums, backend="interpret"), given(Sums)
    with programs_at_once(in_turn(2)) as seen:
        found = fast.apply(*values)
    assert seen.launches
    torch.testing.assert_close(found, Sums.apply(*values))
