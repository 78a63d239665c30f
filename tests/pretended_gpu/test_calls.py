"""Calls as training code makes them, on the pretended GPU: eager's values, and launches where they belong."""

from __future__ import annotations

import os
from typing import Any

import pytest

ONCE = (
    "saved_on_cpu", "autocast", "twice_and_thrice", "transformed", "asking_data", "inside_torch_compile", "streams",
    "captured_launches", "described", "captured_on_the_other_device", "two_devices", "profiled",
)  # fmt: skip


@pytest.mark.parametrize("scene", ONCE)
def test_a_call(scene: str, play: Any) -> None:
    assert play(scene)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool, play: Any) -> None:
    assert play("checkpointed", reentrant=reentrant)


@pytest.mark.parametrize("derive", ["forward", "backward"])
def test_forward_mode(derive: str, play: Any) -> None:
    assert play("forward_mode", derive=derive)


@pytest.mark.parametrize("rows", [16, 17, 1, 0])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "step", "unaligned", "expanded"])
def test_layouts(layout: str, rows: int, play: Any) -> None:
    launched = play("laid_out", layout=layout, rows=rows)
    assert launched or not rows


@pytest.mark.parametrize("rounds", [20])
def test_many_threads(rounds: int, play: Any) -> None:
    if os.environ.get("FUSEGRAD_TESTS") != "all":
        pytest.skip("minutes: FUSEGRAD_TESTS=all")
    assert play("threads", count=32, rounds=rounds, limit=800.0)


@pytest.mark.parametrize("match", ["RMSNorm[512", "DropoutBiasResidual[512", "CrossEntropy[8192,32000", ""])
def test_the_benchmark_program(match: str, play: Any) -> None:
    assert play("benchmark", match=match, limit=800.0)  # all 22 Functions take three minutes of a processor
