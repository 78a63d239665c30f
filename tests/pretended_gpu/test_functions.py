"""Every Function of the benchmarks, of the gallery and of tests/suite on the pretended GPU, beside eager."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fusegrad.benchmarks.suite import CASES
from fusegrad.examples.gallery.catalogue import CATALOGUE

sys.path.insert(0, str(Path(__file__).parents[1] / "suite"))
import functions as catalogue

NO_KERNELS = {"gradient_reversal", "soft_rank", "soft_sort"}
"""Of the gallery: a backward of one operation of torch's, or library calls alone."""


@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_a_benchmark(name: str, play: Any) -> None:
    launched = play("suite", name=name)
    assert any("forward" in k for k in launched) and any("backward" in k for k in launched), launched


@pytest.mark.parametrize("name", list({c.function: c.name for c in CASES}.values()))
def test_a_benchmark_differentiated_twice(name: str, play: Any) -> None:
    play("suite_twice", name=name)


@pytest.mark.parametrize("name", [e.name for e in CATALOGUE])
def test_a_function_of_the_gallery(name: str, play: Any) -> None:
    launched = play("gallery", name=name)
    assert launched or name in NO_KERNELS


@pytest.mark.parametrize("name", [c.name for c in catalogue.CASES])
def test_a_function_of_the_suite(name: str, play: Any) -> None:
    play("function", name=name)
