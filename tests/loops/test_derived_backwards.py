"""Autograd's own backward of plain functions with loops: a loop as well, for all lengths, with kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from loops.derived import DERIVED, Derived, gated_attention, log_partition, window_by_taps
from torch import Tensor

import fusegrad
from fusegrad.ir.text.text import show

LENGTHS = (13, 21, 34)
MANY = 512


def outcome(function: Any, args: Sequence[Tensor]) -> list[Tensor]:
    results = function(*args)
    moving = results if isinstance(results, tuple) else (results,)
    torch.manual_seed(1)
    leaves = [a for a in args if a.requires_grad]
    return [*moving, *torch.autograd.grad(moving, leaves, [torch.randn_like(r) for r in moving])]


def require_same_bits(function: Any, make: Callable[[int], tuple[Tensor, ...]]) -> None:
    """At all lengths, by what was captured at the first."""
    fast = fusegrad.compile(function)
    captures = []
    for steps in LENGTHS:
        torch.manual_seed(steps)
        args = make(steps)
        before = fusegrad.stats()["captures"]
        assert all(map(torch.equal, outcome(fast, args), outcome(function, args)))
        captures.append(fusegrad.stats()["captures"] - before)
    assert captures[1:] == [0, 0]


@pytest.mark.parametrize("case", DERIVED, ids=lambda c: c.name)
def test_one_graph_has_the_bits_of_autograd(case: Derived) -> None:
    require_same_bits(case.function, case.make)


@pytest.mark.parametrize("case", DERIVED, ids=lambda c: c.name)
def test_values_on_kernels(case: Derived) -> None:
    with fusegrad.config.patch(backend="interpret"):
        fast = fusegrad.compile(case.function)
        torch.manual_seed(0)
        args = case.make(LENGTHS[0])
        for found, expected in zip(outcome(fast, args), outcome(case.function, args), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", DERIVED, ids=lambda c: c.name)
def test_launches_do_not_grow_with_time(case: Derived) -> None:
    given = case.make(MANY)
    args = [torch.empty_like(a, dtype=torch.float32, device="meta").requires_grad_(a.requires_grad) for a in given]
    explanation = fusegrad.explain(fusegrad.compile(case.function), *args, target="cuda:90")
    assert {explanation.methods[m].reason for m in ("forward", "backward")} == {None}
    assert explanation.directions["backward"].launch_count <= case.launches, explanation


def test_a_last_turn_with_a_loop_of_its_own_in_it() -> None:
    """Taps are alike, too: when the last turn was completed they were written twice, and read before that."""
    args = [torch.empty(*shape, device="meta").requires_grad_() for shape in ((8, 100, 4), (4, 4))]
    explanation = fusegrad.explain(fusegrad.compile(window_by_taps), *args, target="cuda:90")
    assert explanation.methods["backward"].reason is None
    assert explanation.directions["backward"].launch_count <= 3


def test_a_state_that_is_read_along_two_axes_leaves_two_in_a_tile() -> None:
    """The transitions' gradient is made of the state, and the state of a sum along it: three axes were too many."""
    args = [torch.empty(*shape, device="meta").requires_grad_() for shape in ((2, 100, 64), (64, 64))]
    explanation = fusegrad.explain(fusegrad.compile(log_partition), *args, target="cuda:90")
    assert explanation.directions["backward"].launch_count <= 3


def test_a_step_of_a_whole_slice_is_read_as_a_step() -> None:
    """`k[:, :, i]` is a select of whole slices: an index that is data has no direction, and states were kept whole."""
    args = [torch.empty(2, 2, 100, n, device="meta").requires_grad_() for n in (8, 8, 32, 8)]
    explanation = fusegrad.explain(fusegrad.compile(gated_attention), *args, target="cuda:90")
    assert "gather" not in show(explanation.graph("backward"))
    found = explanation.directions["backward"]
    assert found.launch_count == 1 and found.moved < 1.5 * found.minimal


def shifted(x: Tensor, w: Tensor) -> Tensor:
    """Its first step tells that w has four numbers, as the window has."""
    window, ys = x.new_zeros(4, x.shape[1]), []
    for t in range(x.shape[0]):
        window = torch.cat([window[1:], x[t : t + 1]])
        ys.append((window * w[:, None]).sum(0))
    return torch.stack(ys)


def test_a_size_that_a_first_step_tells() -> None:
    require_same_bits(shifted, lambda n: (torch.randn(n, 3, requires_grad=True), torch.randn(4, requires_grad=True)))
