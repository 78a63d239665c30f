"""Rows that walk several blocks of the stream: those at a mask's edge, and those between where no mask is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from stream_functions import CASES, Case

LENGTH, WIDTH = 200, 16
BOUNDED = [c for c in CASES if c.name in ("CausalGQA", "Alibi", "SoftcapWindow", "DecayingAttention")]


def found(function: Any, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """The result and the gradients that are there, for the same random output gradient."""
    own = [a.detach().requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments]
    result = function.apply(*own)
    draw = torch.Generator().manual_seed(1)
    result.backward(torch.randn(result.shape, generator=draw).to(result.dtype))
    gradients = [a.grad for a in own if torch.is_tensor(a) and a.grad is not None]
    return [result.detach(), *gradients]


@pytest.mark.parametrize("case", BOUNDED, ids=lambda case: case.name)
def test_blocks_without_a_mask_follow_the_same_extreme(case: Case) -> None:
    arguments = case.arguments(LENGTH, WIDTH)
    exact = found(case.cls, tuple(a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments))
    with fusegrad.config.patch(backend="interpret"):
        got = found(fusegrad.compile(case.cls), arguments)
    for ours, theirs in zip(got, exact, strict=True):
        assert (ours - theirs).abs().max() < 3e-6 * theirs.abs().max()
