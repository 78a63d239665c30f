"""The suite's Functions against float64, forward and backward: their generated kernels, at reduced sizes."""

from __future__ import annotations

import pytest
import torch

import fusegrad
from fusegrad.benchmarks.correctness import faults, results
from fusegrad.benchmarks.inputs import real, reduced
from fusegrad.benchmarks.suite import CASES, Case

SEED = 77


def compared(case: Case, function: type) -> list[str]:
    args = real(case, SEED)
    eager, wide = results(case.function.apply, args, SEED), results(case.function.apply, args, SEED, wide=True)
    return faults(results(function.apply, args, SEED), eager, wide)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_interpreted_kernels_are_as_right_as_eager(case: Case) -> None:
    fast = fusegrad.compile(case.function, backend="interpret", fullgraph=True)
    found = compared(reduced(case), fast)
    assert not found, "\n".join(found)


def test_the_comparison_can_fail() -> None:
    """It sees one wrong element, and a small bias of all."""
    case = reduced(CASES[0])
    args = real(case, SEED)
    eager, wide = (results(case.function.apply, args, SEED, wide=w) for w in (False, True))
    assert not faults(eager, eager, wide)
    for at in range(len(eager)):
        one = [t.clone() for t in eager]
        one[at].view(-1)[3] += one[at].abs().max() / 8
        assert faults(one, eager, wide)
        assert faults([t * 1.01 if i == at else t for i, t in enumerate(eager)], eager, wide)


def test_reduced_cases_keep_their_structure() -> None:
    for case in CASES:
        assert max(t.numel() for t in real(reduced(case), SEED) if isinstance(t, torch.Tensor)) <= 40_000
