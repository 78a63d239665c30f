"""How often a loop is traced at short lengths: no more than tells whether it can be rolled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegrad
from fusegrad.runtime.settings import config
from fusegrad.tracer.capture.capture import Session
from fusegrad.tracer.loops import looped


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The short lengths that are traced, in order."""
    found: list[int] = []
    at_lengths = Session.at_lengths

    def noted(session: Session, small: Mapping[Any, int]) -> AbstractContextManager[Any]:
        found.append(min(small.values()))
        return at_lengths(session, small)

    monkeypatch.setattr(Session, "at_lengths", noted)
    with config.patch(disable="patience"):
        yield found


def require_eager(f: Any, *args: Tensor) -> None:
    assert torch.equal(fusegrad.compile(f)(*args), f(*args))


def from_the_middle(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Each step goes between those before: in no list of the order of the loop."""
    h, hs = x[0], list[Tensor]()
    for t in range(x.shape[0]):
        h = torch.tanh(h + x[t] * y[t] + z[:, t])
        hs.insert(len(hs) // 2, h)
    return torch.stack(hs)


def in_order(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    h, hs = x[0], list[Tensor]()
    for t in range(x.shape[0]):
        h = torch.tanh(h + x[t] * y[t] + z[:, t])
        hs.append(h)
    return torch.stack(hs)


def made(steps: int) -> list[Tensor]:
    return [torch.randn(steps, 3), torch.randn(steps, 3), torch.randn(3, steps)]


def test_a_loop_that_rolls_is_traced_once_at_each_of_three_lengths(lengths: list[int]) -> None:
    require_eager(in_order, *made(11))
    assert lengths == [5, 6, 8]


def test_sizes_that_no_short_trace_shows_are_not_tried_in_turn(lengths: list[int]) -> None:
    require_eager(from_the_middle, *made(11))
    assert lengths == [5, 6, 5, 5, 5], "the first group's with what it learnt; one of each other group, like the first"


def gated(x: Tensor, w: Tensor) -> Tensor:
    """A recurrence behind a row that is taken apart."""
    a, b, c = (x @ w).chunk(3, -1)
    h, hs = torch.zeros_like(a[0]), list[Tensor]()
    for t in range(x.shape[0]):
        h = torch.sigmoid(a[t]) * h + b[t]
        hs.append(c[t] * h)
    return torch.stack(hs)


def test_parts_of_a_row_are_no_loop_over_it(lengths: list[int]) -> None:
    require_eager(gated, torch.randn(40, 2, 4), torch.randn(4, 24))
    assert lengths == [5, 6, 8], "those of the steps; 24 in three parts is in three parts at any length"


def rows_of_nine(x: Tensor, y: Tensor) -> Tensor:
    """A loop within one, which raises where the outer one is short."""
    rows = []
    for s in range(x.shape[1]):
        h = x[0, s]
        for t in range(y.shape[0]):
            h = torch.tanh(h + x[1, 8] * y[t])
        rows.append(h)
    return torch.stack(rows)


def test_a_loop_that_fails_in_a_short_trace_is_looked_at_again_in_a_longer_one(lengths: list[int]) -> None:
    require_eager(rows_of_nine, torch.randn(2, 40), torch.randn(30, 3))
    inner = [5, 6, 8]
    assert lengths == [5, 5, 9, *inner, 10, *inner, 12, *inner]


def test_short_traces_end_after_so_many_operations(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looped, "MOST", 20)
    require_eager(from_the_middle, *made(11))
    assert lengths == [5, 6, 5], "what the loop itself has in 11 steps is spent"
    report = fusegrad.explain(fusegrad.compile(from_the_middle), *made(11))
    assert "at small lengths" in str(report)


def filtered(x: Tensor, a: Tensor) -> Tensor:
    """A second-order filter, whose backward's steps are the same in the middle alone."""
    ys = list[Tensor]()
    for n in range(x.shape[1]):
        y = x[:, n]
        if n >= 1:
            y = y + x[:, n - 1] - a[0] * ys[n - 1]
        if n >= 2:
            y = y + x[:, n - 2] - a[1] * ys[n - 2]
        ys.append(y)
    return torch.stack(ys, 1)


def test_a_backward_that_was_traced_step_by_step_is_looked_at_again_once() -> None:
    """Short traces of 9, 10 and 12 steps tell what those of 5, 6 and 8 do not."""
    fast, captures = fusegrad.compile(filtered), list[int]()
    for steps in (12, 13, 14, 30, 11):
        x, a = torch.randn(3, steps).requires_grad_(), torch.randn(2).requires_grad_()
        gradients = [torch.autograd.grad(f(x, a).square().sum(), (x, a)) for f in (fast, filtered)]
        assert all(map(torch.equal, *gradients)), steps
        captures.append(fusegrad.stats()["captures"])
    assert captures[1:] == [captures[1]] * 4, "of any length, once it had two"


def in_heads(x: Tensor, y: Tensor) -> Tensor:
    """Beside a loop over two tensors, a root of what would be no whole number at small lengths."""
    q, k = (t.reshape(t.shape[0], 4, t.shape[1] // 4) for t in (x, y))
    return torch.einsum("nhd,mhd->hnm", q, k) / math.sqrt(x.shape[1] // 4)


def test_a_root_counts_no_steps(lengths: list[int]) -> None:
    given = torch.randn(5, 48), torch.randn(6, 48)
    fast = fusegrad.compile(in_heads)
    assert torch.equal(fast(*given), in_heads(*given)) and not lengths
    assert fusegrad.explain(fast, *given).methods["forward"].reason is None
