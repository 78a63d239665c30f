"""Sums relative to an extreme that still moves: kept in its pass where no power on the way can exceed eager's."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import error

Tensor = torch.Tensor
INF = float("inf")
ROWS, DEPTH = 200, 16


def later(s: Tensor) -> Tensor:
    """True for columns from a row's own on: what a row sees begins behind its first blocks."""
    return torch.ones(s.shape, dtype=torch.bool, device=s.device).triu()


def own(s: Tensor, t: Tensor) -> Tensor:
    return torch.exp(s - s.amax(-1, keepdim=True))


def scaled_behind(s: Tensor, t: Tensor) -> Tensor:
    return torch.exp((s - s.amax(-1, keepdim=True)) * t)


def scaled_apart(s: Tensor, t: Tensor) -> Tensor:
    return torch.exp(s * t - s.amax(-1, keepdim=True) * t)


def masked_both(s: Tensor, t: Tensor) -> Tensor:
    s = s.masked_fill(~later(s), -INF)
    return torch.exp(s - s.amax(-1, keepdim=True))


def masked_below(s: Tensor, t: Tensor) -> Tensor:
    return torch.exp(s.masked_fill(~later(s), -INF) - s.amax(-1, keepdim=True))


def infinity_made_zero(s: Tensor, t: Tensor) -> Tensor:
    s = s.masked_fill(~later(s), -INF)
    m = s.amax(-1, keepdim=True)
    return torch.exp(s - torch.where(m == -INF, 0.0, m))


def with_a_sink(s: Tensor, t: Tensor) -> Tensor:
    return torch.exp(s - torch.maximum(s.amax(-1, keepdim=True), t))


def with_a_row(s: Tensor, t: Tensor) -> Tensor:
    return torch.exp(s - s.amax(-1, keepdim=True) + t)


def minimum(s: Tensor, t: Tensor) -> Tensor:
    return torch.exp(s.amin(-1, keepdim=True) - s)


def masked_extreme(s: Tensor, t: Tensor) -> Tensor:
    keep = later(s)
    return torch.exp(s - s.masked_fill(~keep, -INF).amax(-1, keepdim=True)) * keep


def of_twice(s: Tensor, t: Tensor) -> Tensor:
    return torch.exp(2 * s - s.amax(-1, keepdim=True) - t.exp())


def of_minimum(s: Tensor, t: Tensor) -> Tensor:
    return torch.exp(s - s.amin(-1, keepdim=True) - t.exp())


def of_squares(s: Tensor, t: Tensor) -> Tensor:
    return torch.exp(s * 0.5 - s.square().amax(-1, keepdim=True))


ONE_WALK = (
    own, scaled_behind, scaled_apart, masked_both, masked_below, infinity_made_zero, with_a_sink, with_a_row, minimum,
)  # fmt: skip
TWO_WALKS = (masked_extreme, of_twice, of_minimum, of_squares)
Power = Callable[[Tensor, Tensor], Tensor]
every = pytest.mark.parametrize("power", ONE_WALK + TWO_WALKS, ids=lambda p: p.__name__)


def summed(power: Power) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        return power(q @ k.mT, t) @ v

    call.__name__ = call.__qualname__ = power.__name__
    return call


def rising(last: float, first: float = 0.0) -> tuple[Tensor, ...]:
    """Scores of a row of ones times k: these numbers, from the first column to the last."""
    q, v = torch.zeros(ROWS, DEPTH), torch.linspace(-1, 1, ROWS * DEPTH).view(ROWS, DEPTH)
    q[:, 0] = 1.0
    k = torch.zeros(ROWS, DEPTH)
    k[:, 0] = torch.linspace(first, last, ROWS)
    return q, k, v, torch.tensor(0.5)


@every
def test_later_blocks_with_other_extremes(power: Power) -> None:
    """Wherever eager is finite, we are, and with its digits: a first call does not see all that a row may hold."""
    call = summed(power)
    fast = fusegrad.compile(call, backend="interpret", fullgraph=True)
    fast(*(0.1 * a for a in rising(1.0)))
    for arguments in (rising(3.0), rising(150.0), rising(-150.0), rising(-90.0, 90.0)):
        found, eager = fast(*arguments), call(*arguments)
        assert torch.equal(found.isfinite(), eager.isfinite())
        finite = eager.isfinite().all(-1)
        exact = call(*(a.double() for a in arguments))
        assert not finite.any() or error(found[finite], exact[finite]) < 1e-4


@every
def test_walks(power: Power) -> None:
    """A second walk where it is not known that the extreme is one of what is beside it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fusegrad.explain(fusegrad.compile(summed(power)), *[f"f32[{ROWS},{DEPTH}]"] * 3, "f32[]")
    walk = str(found.directions["forward"].launches[0].walk)
    assert ("walks them 2 times" in walk) == (power in TWO_WALKS)
    assert ("rescaled" in walk) == (power in ONE_WALK)
