"""What a loop wrote to a buffer lies in memory as eager's buffer does, where something is made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz_loops import verdict_of
from torch import Tensor

import fusegrad


def filled(x: Tensor, w: Tensor) -> Any:
    """The buffer lies as its model does."""
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        out[t] = x[t] * w
    return out * w, out


def copied(x: Tensor, w: Tensor) -> Any:
    """What is copied lies otherwise than where it is copied to."""
    h = torch.zeros(x.shape[1], x.shape[1])
    hs = []
    for t in range(x.shape[0]):
        h.copy_((x[t][:, None] * w).t())
        hs.append(h * 2)
    return hs[-1], torch.stack(hs), h


def exchanged(x: Tensor, w: Tensor) -> Any:
    """All of a state is written to."""
    h = torch.zeros(x.shape[1], x.shape[1])
    k = h
    for t in range(x.shape[0]):
        h[:] = (x[t][:, None] * w).t()
        k = k + h
    return k, h + 1


def one_for_all(x: Tensor, w: Tensor) -> Any:
    """Every step writes the same, which stands at one place for each row."""
    out = torch.zeros(3, 3, x.shape[0])
    k = w
    for t in range(x.shape[0]):
        out[:, :, t] = w.expand(3, 3)
        k = out[..., t] * 2
    return k, out.exp(), out[..., 1:] * x[0, 0]


def arguments(steps: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(steps)
    return torch.randn(3, steps).t().requires_grad_(), torch.randn(3, requires_grad=True)


def results(f: Callable[..., Any], steps: int) -> list[Tensor]:
    args = arguments(steps)
    found = f(*args)
    cotangents = [torch.cos(torch.arange(o.numel()) * 1.0).view(o.shape) for o in found]
    return [*found, *torch.autograd.grad(found, args, cotangents)]


@pytest.mark.parametrize("f", [filled, copied, exchanged, one_for_all])
def test_strides_are_those_of_eager(f: Callable[..., Any]) -> None:
    with fusegrad.config.patch(disable="patience"):
        fast = fusegrad.compile(f)
        for steps in (12, 15):
            for a, b in zip(results(f, steps), results(fast, steps), strict=True):
                assert torch.equal(a, b) and a.stride() == b.stride()
    assert verdict_of(fast) == "rolled"


def decayed(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """The derivative of what is written to the buffer is a loop, found at small lengths of another."""
    state, out = torch.zeros(q.shape[0], 3, 3), torch.zeros_like(q)
    for t in range(q.shape[1]):
        state = state * w[:, t].exp()[..., None] + k[:, t][..., None] * k[:, t][:, None]
        out[:, t] = (q[:, t][..., None] * state).sum(-2)
    return out


def test_a_gradient_that_is_one_number_leaves_the_loop_of_a_buffer_a_loop() -> None:
    fast = fusegrad.compile(decayed)
    for steps in (12, 15):
        args = [torch.rand(2, steps, 3, requires_grad=True) for _ in range(3)]
        pairs = zip(*(torch.autograd.grad(f(*args).sum(), args) for f in (fast, decayed)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert fast._fusegrad.ledger.records["backward"].reason is None


def test_a_loop_of_which_nothing_is_left_is_none() -> None:
    """What every step writes is the same: all of it leaves the loop."""
    pytest.importorskip("triton")
    with fusegrad.config.patch(disable="patience", backend="interpret", debug=True):
        fast = fusegrad.compile(one_for_all)
        for a, b in zip(results(one_for_all, 12), results(fast, 12), strict=True):
            torch.testing.assert_close(a, b)


def solved(y: Tensor, times: Tensor) -> Tensor:
    ys = [y]
    for t in range(times.shape[0] - 1):
        y = y + (times[t + 1] - times[t]) * torch.sin(y)
        ys.append(y)
    return torch.stack(ys)


@pytest.mark.filterwarnings("error::fusegrad.FallbackWarning")
def test_slices_of_a_gradient_lie_as_the_gradient_does() -> None:
    """In derived backwards the slices are a loop of their own; sums along both axes go through memory."""
    torch.manual_seed(0)
    args = [torch.randn(5, 7).requires_grad_(), torch.rand(12).requires_grad_()]
    weights = torch.randn(12, 7, 5).mT
    with fusegrad.config.patch(backend="reference"):
        both = [torch.autograd.grad(f(*args), args, weights) for f in (fusegrad.compile(solved), solved)]
    assert all(map(torch.equal, *both))


def outer_products(x: Tensor, dt: Tensor, b: Tensor) -> Tensor:
    """The state's gradient begins with that of the last result alone, and lies as that does."""
    h, ys = x.new_zeros(*x.shape[1:], b.shape[1]), []
    for t in range(x.shape[0]):
        h = dt[t].exp()[..., None] * h + (dt[t] * x[t])[..., None] * b[t]
        ys.append((h * b[t]).sum(-1))
    return torch.stack(ys)


@pytest.mark.filterwarnings("error::fusegrad.FallbackWarning")
@pytest.mark.parametrize("layout", [lambda g: g.mT.contiguous().mT, lambda g: g[..., :1, :].expand(g.shape)])
def test_a_first_step_without_a_gradient_of_later_ones_lies_as_its_own(layout: Callable[[Tensor], Tensor]) -> None:
    """What it lacks is added as -0.0, which came first and was row-major: sums of that go another way."""
    torch.manual_seed(0)
    args = [torch.randn(9, *shape, requires_grad=True) for shape in ((4, 5), (4, 1), (6,))]
    weights = layout(torch.randn(9, 4, 5))
    with fusegrad.config.patch(backend="reference"):
        calls = fusegrad.compile(outer_products), outer_products
        both = [torch.autograd.grad(call(*args), args, weights) for call in calls]
    assert all(map(torch.equal, *both))
