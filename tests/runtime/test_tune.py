"""The configuration of a kernel: candidates from the schedule, timed once per bucket of sizes, remembered on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from function_samples import RMSNorm, leaf

import fusegrad
from fusegrad.codegen import TARGETS, Kernel
from fusegrad.runtime import launch, plan, tune


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path / "cache"))


def kernel(warps: int) -> Kernel:
    return Kernel("k", "", (), {}, 1, warps)


@pytest.mark.parametrize(
    ("target", "warps", "expected"),
    [("cuda:90", 4, [4, 2, 8]), ("cuda:90", 32, [32, 16]), ("cuda:90", 1, [1, 2]), ("hip:gfx942", 16, [16, 8])],
)
def test_candidates_are_the_schedule_and_its_neighbours(target, warps, expected) -> None:
    assert [k.num_warps for k in tune.configurations(kernel(warps), TARGETS[target])] == expected


class Clock:
    """Says what it is told, and counts the questions."""

    def __init__(self, *times: float) -> None:
        self.times, self.asked = times, 0

    def __call__(self, launches: Sequence[Callable[[], None]]) -> list[float]:
        self.asked += 1
        for each in launches:
            each()
        return list(self.times)[: len(launches)]


def chosen(clock: Clock, numbers: Sequence[int] = (4096, 1024), device: str = "one", text: str = "text") -> int:
    options = tune.configurations(kernel(4), TARGETS["cuda:90"])
    return tune.fastest(device, options, text, numbers, lambda k: lambda: None, clock).num_warps


def test_an_answer_is_kept_for_device_text_and_bucket() -> None:
    first = Clock(3.0, 2.0, 1.0)
    assert chosen(first) == 8 and first.asked == 1
    other = Clock(1.0, 2.0, 3.0)
    assert chosen(other) == 8 and chosen(other, (4097, 1030)) == 8 and other.asked == 0  # from the disk
    assert chosen(other, (8192, 1024)) == 4 and chosen(other, device="two") == 4 and chosen(other, text="other") == 4
    assert other.asked == 3


def test_ties_and_refusals_leave_what_was_scheduled() -> None:
    assert chosen(Clock(1.0, 1.0, 1.0)) == 4
    assert chosen(Clock(1.0, float("inf"), float("inf")), text="refused") == 4


def test_buckets_are_powers_of_two() -> None:
    assert tune.bucket((4096, 8191, 1, 0)) == (13, 13, 1, 0)


def launched_with(monkeypatch: pytest.MonkeyPatch, clock: Clock, calls: int = 1) -> list[int]:
    """The warps of every launch of an RMSNorm forward, Triton stubbed, with tuning on."""
    seen: list[int] = []

    def launcher(kernel: Any, text: str, backend: str, device: Any = None) -> Any:
        return lambda arguments, grid: seen.append(kernel.num_warps)

    monkeypatch.setattr(launch, "launcher", launcher)
    monkeypatch.setattr(plan, "target_for", lambda backend, device: TARGETS["cuda:90"])
    monkeypatch.setattr(tune, "events", clock)
    fast: Any = fusegrad.compile(RMSNorm, backend="triton")
    for _ in range(calls):
        fast.apply(leaf(64, 256).detach(), torch.ones(256), 1e-6)
    return seen


def test_the_fastest_serves_from_the_first_call_on(monkeypatch) -> None:
    clock = Clock(3.0, 1.0, 2.0)
    with fusegrad.config.patch(tune=True):
        seen = launched_with(monkeypatch, clock, 6)
    trials, served = seen[:3], seen[3:]
    assert clock.asked == 1 and len(served) == 6 and set(served) == {trials[1]}
    assert trials[1] in (trials[0] // 2, trials[0] * 2)


def test_nothing_is_timed_unless_asked_for(monkeypatch) -> None:
    clock = Clock(3.0, 1.0, 2.0)
    assert len(launched_with(monkeypatch, clock, 2)) == 2 and clock.asked == 0
