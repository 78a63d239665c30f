"""Launches and bytes of each loop Function of the suite, as `explain` counts them; its kernels compiled for targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops.suite import FUNCTIONS, LoopFunction

import fusegrad

LENGTHS, WIDTH = (1, 2, 100, 4096), 32
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
ALLOWED = 1.10
"""Bytes beside the least possible."""
LAUNCHES = (0, 1, 3)
"""Of a direction: what is a view needs none, a loop in chunks of time three."""
Figures = dict[str, tuple[int, float]]

MISSES: dict[tuple[str, int], Figures] = {}
"""What is not within these, by class and steps: launches and ratio of each direction that is not."""


def in_meta(case: LoopFunction, steps: int, width: int) -> list[Any]:
    """The arguments of a call without their numbers."""
    given = case.arguments(steps, width)
    return [
        torch.empty_like(a, device="meta").requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
        for a in given
    ]


def misses(case: LoopFunction, fast: Any, steps: int) -> Figures:
    """Of each direction that has more launches or bytes than it should, both."""
    found = fusegrad.explain(fast, *in_meta(case, steps, WIDTH), target="cuda:90").directions
    assert set(found) == {"forward", "backward"}
    rows = {name: (r.launch_count, round(r.moved / r.minimal, 2)) for name, r in found.items()}
    return {name: row for name, row in rows.items() if row[0] not in LAUNCHES or row[1] > ALLOWED}


@pytest.mark.parametrize("case", [c for c in FUNCTIONS if not c.product], ids=lambda c: c.name)
def test_a_loop_is_one_launch_that_moves_what_it_must(case: LoopFunction) -> None:
    """Where it is not, it is in the table with the figures that it has: better ones have to leave it."""
    fast = fusegrad.compile(case.cls)
    for steps in (n for n in LENGTHS if n >= case.shortest):
        assert misses(case, fast, steps) == MISSES.get((case.name, steps), {}), steps


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda c: c.name)
def test_kernels_compile_without_spills(case: LoopFunction, width: int) -> None:
    fast, args = fusegrad.compile(case.cls), in_meta(case, 96, width)
    found = fusegrad.explain(fast, *args, target="cuda:90").binaries(*TARGETS[:3])
    amd = fusegrad.explain(fast, *args, target="hip:gfx942").binaries("hip:gfx942")
    rows = [(kernel, target, b) for by in (found, amd) for kernel, each in by.items() for target, b in each.items()]
    assert rows and not [(k, t, b.error, b.spills) for k, t, b in rows if b.error or b.spills not in (0, -1)]


def test_every_miss_is_of_a_class() -> None:
    names = {c.name for c in FUNCTIONS}
    assert all(name in names and steps in LENGTHS and figures for (name, steps), figures in MISSES.items())
