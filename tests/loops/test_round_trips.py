"""A loop over time and one that goes back over the same lanes: one kernel, in which steps are made again in blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from loops.derived import rand
from torch import Tensor

import fusegrad


def cell(a: Tensor, x: Tensor) -> Tensor:
    """What autograd reads of a step is more than what it carries."""
    h, c, out = torch.zeros_like(x[0]), torch.ones_like(x[0]), []
    for t in range(x.shape[0]):
        h = torch.tanh(a[t] * h + x[t])
        c = torch.sigmoid(h) * c + torch.exp(-h * h)
        out.append(c * h)
    return torch.stack(out)


def cell_from_the_end(a: Tensor, x: Tensor) -> Tensor:
    """The same against time: its backward makes the states again from the end."""
    h, c, out = torch.zeros_like(x[0]), torch.ones_like(x[0]), []
    for t in reversed(range(x.shape[0])):
        h = torch.tanh(a[t] * h + x[t])
        c = torch.sigmoid(h) * c + torch.exp(-h * h)
        out.append(c * h)
    return torch.stack(out[::-1])


def keyed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A state of keys by values that a step sums along, and changes by what it found."""
    state, out = q.new_zeros(q.shape[0], q.shape[2], v.shape[2]), []
    for t in range(q.shape[1]):
        found = (state * k[:, t, :, None]).sum(1)
        state = torch.tanh(state + k[:, t, :, None] * (v[:, t] - found)[:, None])
        out.append((q[:, t, :, None] * state).sum(1))
    return torch.stack(out, 1)


class Trip(NamedTuple):
    """function; its arguments by number of steps; the shape of real ones, the ratio of bytes that backward moves."""

    function: Callable[..., Any]
    make: Callable[[int], tuple[Tensor, ...]]
    real: tuple[int, ...]
    ratio: float

    @property
    def name(self) -> str:
        return self.function.__name__


TRIPS = (
    Trip(cell, lambda n: (rand(n, 3, 5), rand(n, 3, 5)), (1024, 128, 1024), 1.5),
    Trip(cell_from_the_end, lambda n: (rand(n, 3, 5), rand(n, 3, 5)), (1024, 128, 1024), 1.5),
    Trip(keyed, lambda n: (rand(2, n, 4), rand(2, n, 4), rand(2, n, 6)), (64, 1024, 32), 1.72),
)
LENGTHS = (40, 33, 7)
"""That blocks divide, that they do not, and less than a block."""


def gradients(function: Any, args: Sequence[Tensor]) -> list[Tensor]:
    out = function(*args)
    torch.manual_seed(1)
    return [out, *torch.autograd.grad(out, [a for a in args if a.requires_grad], torch.randn_like(out))]


def on_kernels(trip: Trip, given: Sequence[Sequence[Tensor]], without: Sequence[str] = ()) -> list[list[Tensor]]:
    """What is found of these arguments, by what was generated for the first of them."""
    with fusegrad.config.patch(backend="interpret", disable=[*without]):
        fast = fusegrad.compile(trip.function)
        return [gradients(fast, args) for args in given]


def explained(trip: Trip) -> fusegrad.Explanation:
    args = [torch.empty(trip.real, device="meta", requires_grad=True) for _ in trip.make(2)]
    return fusegrad.explain(fusegrad.compile(trip.function), *args, target="cuda:90")


@pytest.mark.parametrize("trip", TRIPS, ids=lambda t: t.name)
def test_what_is_made_again_has_the_bits_of_what_was_made(trip: Trip) -> None:
    given = [trip.make(steps) for steps in LENGTHS]
    made = on_kernels(trip, given, without=["at_once"])
    alone = on_kernels(trip, given, without=["at_once", "round_trips"])
    for found, kept, args in zip(made, alone, given, strict=True):
        assert all(map(torch.equal, found, kept))
        for value, expected in zip(found, gradients(trip.function, args), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("trip", TRIPS[1:], ids=lambda t: t.name)
def test_backward_is_one_launch_whose_states_are_never_in_memory(trip: Trip) -> None:
    report = explained(trip)
    back = report.directions["backward"]
    assert (back.launch_count, round(back.moved / back.minimal, 2)) == (1, trip.ratio)
    assert "there and back, made again by" in str(report)
    assert not [f for p in report.proofs for f in p.faults]


def test_the_two_loops_have_two_kernels_without_the_switch() -> None:
    with fusegrad.config.patch(disable=["round_trips"]):
        assert explained(TRIPS[0]).directions["backward"].launch_count == 2
    with fusegrad.config.patch(disable=["blocks_of_steps"]):
        back = explained(TRIPS[0]).directions["backward"]
        assert back.launch_count == 1 and back.moved > TRIPS[0].ratio * back.minimal
