"""Steps that autograd does not follow, in loops that fill a buffer: derivatives stop where eager's stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jvp

import fusegrad

Call = Callable[..., tuple[Tensor, ...]]


def detached_reads(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    out = x.new_zeros(x.shape[0], 2)
    for t in range(x.shape[0]):
        out[t] = w * x[t].detach().sin()
    return out, out * w


def detached_states(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    out, h = x.new_zeros(x.shape[0], 2), w
    for t in range(x.shape[0]):
        out[t] = h * x[t].sin()
        h = out[t].detach() + x[t]
    return out * w, h


def detached_before_a_write(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    out, h = x.new_zeros(x.shape[0], 2), w
    for t in range(x.shape[0]):
        out[t] = h * x[t]
        d = out[t].detach()
        out[t] += 1
        h = d + x[t]
    return out * w, h


def written_without_history(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    out, h = x.new_zeros(x.shape[0], 2), w
    for t in range(x.shape[0]):
        h = h * x[t]
        with torch.no_grad():
            out[t] = h
    return out * w, h


def written_past_history(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    out = x * 1
    for t in range(x.shape[0]):
        with torch.no_grad():
            out[t] = w.sin()
    return out * w, out.sin()


CUT = (detached_reads, detached_states, detached_before_a_write)
UNRECORDED = (written_without_history, written_past_history)


def arguments() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(9, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)]


def twice(call: Call) -> Sequence[Tensor]:
    leaves = [a.requires_grad_() for a in arguments()]
    total = sum(r.sin().sum() for r in call(*leaves))
    first = torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)  # type: ignore[arg-type]
    again = sum(g.cos().sum() for g in first if g.requires_grad)
    return [*first, *torch.autograd.grad(again, leaves, materialize_grads=True)]  # type: ignore[arg-type]


def require_same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("call", [*CUT, *UNRECORDED], ids=lambda f: f.__name__)
def test_second_derivatives_are_eagers(call: Call) -> None:
    require_same(twice(fusegrad.compile(call)), twice(call))


@pytest.mark.parametrize("call", [detached_reads, written_without_history], ids=lambda f: f.__name__)
def test_second_derivatives_of_kernels_are_eagers(call: Call) -> None:
    with fusegrad.config.patch(backend="interpret"):
        require_same(twice(fusegrad.compile(call)), twice(call))


@pytest.mark.parametrize("call", CUT, ids=lambda f: f.__name__)
def test_what_is_detached_has_no_tangent(call: Call) -> None:
    args, tangents = arguments(), tuple(torch.ones_like(a) for a in arguments())
    require_same(jvp(fusegrad.compile(call), tuple(args), tangents)[1], jvp(call, tuple(args), tangents)[1])
