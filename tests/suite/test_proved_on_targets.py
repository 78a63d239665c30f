"""On no GPU does a kernel of a known Function go through torch because of an access that is not proved."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import fusegrad
from fusegrad.benchmarks.suite import CASES as BENCHMARKS
from fusegrad.codegen import TARGETS
from fusegrad.examples.gallery.catalogue import CATALOGUE

sys.path.insert(0, str(Path(__file__).parent))
from functions import CASES

GPUS = [target for target in TARGETS if target != "cpu"]
GIVEN = {
    **{case.name: (case.function, lambda case=case: case.args) for case in BENCHMARKS},
    **{entry.name: (entry.written, lambda entry=entry: entry.arguments()) for entry in CATALOGUE},
    **{f"suite {case.name}": (case.cls, lambda case=case: case.make(8)) for case in CASES},
}


def unlaunched(function: Any, args: Sequence[Any], target: str) -> list[str]:
    """The groups of a Function whose kernels do not run at these sizes, with the reason."""
    directions = fusegrad.explain(function, *args, target=target).directions.values()
    return [reason for direction in directions for reason in direction.reasons if "not proved" in reason]


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("name", GIVEN)
def test_every_kernel_runs_at_the_sizes_of_its_case(name: str, target: str) -> None:
    function, arguments = GIVEN[name]
    assert unlaunched(function, arguments(), target) == []
