"""The steps of `make gpu` that decide on right or wrong, as tests: every Function at real sizes, launches, exports."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from fusegrad.benchmarks.gpu_day.steps import STEPS, Step

STEPS_OF_RIGHT = ("doctor", "telling", "functions", "gallery", "launching", "exports", "models", "products", "rest")
UNITS = [(step, unit) for step in STEPS if step.name in STEPS_OF_RIGHT for unit in step.units()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("step", "unit"), UNITS, ids=[f"{step.name}-{unit}" for step, unit in UNITS])
def test_right(step: Step, unit: str) -> None:
    module, _, name = step.body.partition(":")
    facts: dict[str, Any] = getattr(importlib.import_module(module), name)(unit, "cuda")
    if "skipped" in facts:
        pytest.skip(facts["skipped"])
    assert list(facts["faults"]) == []
