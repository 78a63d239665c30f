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
LAUNCHES = (0, 1)
"""Of a direction: what is a view needs none."""
Figures = dict[str, tuple[int, float]]

LENGTHS_OF = {"Sinkhorn": (1, 2, 100)}
"""Where another length takes minutes: a number of iterations is unrolled."""
MISSES: dict[tuple[str, int], Figures] = {
    # a matmul of all steps beside the loop is the library's
    ("Retention", 2): {"backward": (2, 1.03)},
    ("Retention", 100): {"backward": (2, 1.03)},
    ("Retention", 4096): {"backward": (2, 1.03)},
}
"""What is not within these, by class and steps: launches and ratio of each direction that is not."""

CELLS = {
    "EchoState": (1, 3),
    "GRU": (1, 6),
    "JoinedLSTM": (2, 8),
    "LSTM": (1, 3),
    "TorchGRU": (2, 8),
    "VanillaRNN": (1, 3),
}
"""Launches of forward and backward where a step multiplies what it carries: a kernel for each loop, and the products of
all steps at once, the sums of what they add up and the first step beside it."""


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
    for steps in (n for n in LENGTHS_OF.get(case.name, LENGTHS) if n >= case.shortest):
        assert misses(case, fast, steps) == MISSES.get((case.name, steps), {}), steps


@pytest.mark.parametrize("case", [c for c in FUNCTIONS if c.product], ids=lambda c: c.name)
def test_a_recurrent_cell_is_no_launch_for_each_step(case: LoopFunction) -> None:
    report = fusegrad.explain(fusegrad.compile(case.cls), *in_meta(case, 100, WIDTH), target="cuda:90")
    found = report.directions
    assert (found["forward"].launch_count, found["backward"].launch_count) == CELLS[case.name]
    assert all(k.times == 1 for k in report.kernels)


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda c: c.name)
def test_kernels_compile_without_spills(case: LoopFunction, width: int) -> None:
    fast, args = fusegrad.compile(case.cls), in_meta(case, 96, width)
    plans = {target: fusegrad.explain(fast, *args, target=target) for target in TARGETS}
    rows = [(kernel, t, by[t]) for t, plan in plans.items() for kernel, by in plan.binaries(t).items()]
    assert rows and not [(k, t, b.error) for k, t, b in rows if b.error]
    assert not [(k, t, b.spills) for k, t, b in rows if b.spills not in (0, -1)]


def test_misses_are_of_lengths_that_are_asked() -> None:
    names = {c.name for c in FUNCTIONS}
    lengths = {name: LENGTHS_OF.get(name, LENGTHS) for name in names}
    assert all(name in names and steps in lengths[name] and row for (name, steps), row in MISSES.items())
