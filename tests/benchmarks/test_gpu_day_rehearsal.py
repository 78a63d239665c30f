"""Every step of `make gpu` on the pretended GPU, at tiny sizes; FUSEGRAD_TESTS=all takes every unit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusegrad.benchmarks.gpu_day.__main__ import environment, surroundings
from fusegrad.benchmarks.gpu_day.child import Child
from fusegrad.benchmarks.gpu_day.steps import STEPS, Step

sys.path.insert(0, str(Path(__file__).parents[1] / "pretended_gpu"))
from building import lacks

SAME = ("rest", "times of the rest", "times with autotuning")
"""Of these, whose bodies are those of steps before them, the first unit alone."""
UNITS = [(step, unit) for step in STEPS for unit in (step.units()[:1] if step.name in SAME else step.units())]
LAUNCH_ELSEWHERE = ("tests", "sanitizer")
NO_LAUNCHES = ("C++ pair", "module", "gradient_reversal", "soft_rank", "soft_sort")
"""Units without a launch of fusegrad's own in their process."""
pytestmark = pytest.mark.skipif(bool(lacks()), reason=f"no pretended GPU: {lacks()}")


@pytest.fixture(scope="module")
def children() -> Iterator[dict[str, Child]]:
    """A process for each body."""
    known: dict[str, Child] = {}
    yield known
    for child in known.values():
        child.stop()


@pytest.mark.parametrize(("step", "unit"), UNITS, ids=[f"{step.name}-{unit}" for step, unit in UNITS])
def test_a_step(step: Step, unit: str, children: dict[str, Child]) -> None:
    child = children.get(step.body)
    if child is None:
        child = children[step.body] = Child("pretended", step.body, {**environment("pretended"), "FUSEGRAD_STORE": "0"})
    found = child.ask(unit, 240, 280)
    assert found["outcome"] in ("ok", "skipped"), found
    if found["outcome"] == "ok" and step.name not in LAUNCH_ELSEWHERE and unit not in NO_LAUNCHES:
        assert found["facts"]["launches"] > 0


def test_a_machine_is_known_by_what_results_depend_on() -> None:
    pretended, plain = surroundings("pretended"), surroundings("cuda")
    assert pretended["device"] == "pretended" and pretended["units"] == 132
    assert {"torch", "triton"} <= set(pretended["versions"])
    assert "absent" in plain or plain["device"] != "pretended"
