"""Steps of a loop that an index adds up: by place, in the loop's kernel, where that takes no longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

import fusegrad

ANY = Any
STEPS, BATCH, STATES, PLACES = 6, 3, 5, 7


def step(h: Tensor, x: Tensor) -> Tensor:
    """Elements read their neighbours: no step is a scan of many."""
    return torch.tanh(h + F.pad(h, (1, 0))[:, :-1] + x)


def every_step(x: Tensor) -> Tensor:
    h, hs = torch.zeros_like(x[0]), []
    for t in range(x.shape[0]):
        h = step(h, x[t])
        hs.append(h)
    return torch.stack(hs)


class NoBackward(Function):
    """What is asked of forward alone."""

    @staticmethod
    def backward(ctx: ANY, *g: Tensor) -> ANY:
        return None, None, None


class Beside(NoBackward):
    """All steps at once, the last one beside the loop."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, places: Tensor, base: Tensor) -> Tensor:
        h = x[-1]
        hs = [h]
        for t in range(x.shape[0] - 2, -1, -1):
            h = step(h, x[t])
            hs.append(h)
        return base.scatter_add(2, places.expand(x.shape[0], -1, -1), torch.stack(hs[::-1]))


class Within(NoBackward):
    """In each step, onto zeros."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, places: Tensor, base: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[0]), []
        for t in range(x.shape[0]):
            h = step(h, x[t])
            out.append(torch.zeros_like(base[t]).scatter_add(1, places, h))
        return torch.stack(out)


class OneForAll(NoBackward):
    """One index for each row of each step."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, places: Tensor, base: Tensor) -> Tensor:
        return base.index_add(2, places[0], every_step(x))


class Put(NoBackward):
    """By `index_put`: steps and rows by their numbers."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, places: Tensor, base: Tensor) -> Tensor:
        steps, rows = (torch.arange(n, device=x.device) for n in x.shape[:2])
        index = steps[:, None, None], rows[:, None], places
        return base.new_zeros(*x.shape[:2], base.shape[2]).index_put(index, every_step(x), accumulate=True)


class OfEachStep(NoBackward):
    """Other places in each step."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, places: Tensor, base: Tensor) -> Tensor:
        at = (places + torch.arange(x.shape[0], device=x.device)[:, None, None]) % base.shape[2]
        return torch.zeros_like(base).scatter_add(2, at, every_step(x))


ALL: Sequence[type[Function]] = (Beside, Within, OneForAll, Put, OfEachStep)
every = pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)


def arguments(*sizes: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    steps, batch, states, places = sizes
    torch.manual_seed(0)
    index = torch.randint(places, (batch, states), device=device)
    x, base = torch.randn(steps, batch, states, device=device), torch.randn(steps, batch, places, device=device)
    return x.requires_grad_(), index, base


@pytest.mark.parametrize(("cls", "batch"), [(c, n) for c in ALL for n in (2, 1) if (c, n) != (Beside, 1)])
def test_each_place_is_a_sum_in_the_loops_kernel(cls: type[Function], batch: int) -> None:
    report = fusegrad.explain(fusegrad.compile(cls), *arguments(100, batch, 5, 33, device="meta"), target="cuda:90")
    found = report.directions["forward"]
    assert found.launch_count == 1 and found.moved <= 1.1 * found.minimal
    assert all(k.times == 1 for k in report.kernels)


@every
def test_its_numbers_are_eagers(cls: type[Function]) -> None:
    fast = fusegrad.compile(cls, backend="interpret", fullgraph=True)
    for sizes in ((STEPS, BATCH, STATES, PLACES), (STEPS + 1, 1, 1, 1), (STEPS, BATCH, STATES, 70)):
        args = arguments(*sizes)
        torch.testing.assert_close(fast.apply(*args), cls.apply(*args))


@pytest.mark.parametrize("cls", [Beside, Within])
def test_a_place_that_is_none_raises(cls: type[Function]) -> None:
    x, places, base = arguments(STEPS, BATCH, STATES, PLACES)
    fast = fusegrad.compile(cls, backend="interpret")
    places[1, 2] = PLACES
    with pytest.raises((IndexError, RuntimeError), match="index"):
        fast.apply(x, places, base)


def test_many_places_are_the_librarys_on_record() -> None:
    args = arguments(500, 64, 101, 5000, device="meta")
    found = fusegrad.explain(fusegrad.compile(Beside), *args, target="cuda:90").directions["forward"]
    assert any(k.name == "scatter" and k.kind == "library" for k in found.launches)
    assert any("by the library" in line and "us of comparisons" in line for line in found.products)


def test_the_decision_is_on_record_and_can_be_switched_off() -> None:
    args = arguments(100, 2, 5, 33, device="meta")
    found = fusegrad.explain(fusegrad.compile(Beside), *args, target="cuda:90").directions["forward"]
    assert any("by place in the loop's kernel" in line for line in found.products)
    with fusegrad.config.patch(disable="scattered_steps"):
        found = fusegrad.explain(fusegrad.compile(Beside), *args, target="cuda:90").directions["forward"]
    assert found.launch_count == 3 and found.products == []


def test_what_a_call_adds_to_axes_of_other_sizes() -> None:
    """An index of fewer rows than there are."""
    x, places, base = arguments(STEPS, BATCH, STATES, PLACES)
    wide = torch.randn(STEPS, BATCH + 2, PLACES)
    fast = fusegrad.compile(Beside, backend="interpret", fullgraph=True)
    torch.testing.assert_close(fast.apply(x, places, wide), Beside.apply(x, places, wide))
    torch.testing.assert_close(fast.apply(x, places, base), Beside.apply(x, places, base))
