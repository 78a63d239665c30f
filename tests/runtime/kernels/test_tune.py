"""The version of a kernel: candidates are timed once per bucket of sizes, and the answer is remembered on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from function_samples import RMSNorm, leaf

import fusegrad
from fusegrad.codegen import TARGETS
from fusegrad.codegen.schedule.tuning_candidates import OWN
from fusegrad.ir.errors import UnsupportedBackendError
from fusegrad.runtime.cache import store as cache
from fusegrad.runtime.execution import targets
from fusegrad.runtime.execution.group import LIBRARY
from fusegrad.runtime.kernels import autotune as tune
from fusegrad.runtime.kernels import launch
from fusegrad.runtime.profile import tuning


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path / "cache"))


class Clock:
    """Says what it is told, and counts the questions."""

    def __init__(self, *times: float) -> None:
        self.times, self.asked = times, 0

    def __call__(self, launches: Sequence[Callable[[], None]]) -> list[float]:
        self.asked += 1
        for each in launches:
            each()
        return list(self.times)[: len(launches)]


NAMES = ("one", "two", "three")


def chosen(clock: Clock, numbers: Sequence[int] = (4096, 1024), device: str = "one", text: str = "text") -> str:
    return tune.fastest(device, "k", text, numbers, {n: lambda: None for n in NAMES}, clock)


def test_an_answer_is_kept_for_device_text_and_bucket() -> None:
    first = Clock(3.0, 2.0, 1.0)
    assert chosen(first) == "three" and first.asked == 1
    other = Clock(1.0, 2.0, 3.0)
    assert chosen(other) == chosen(other, (4097, 1030)) == "three" and other.asked == 0  # from the disk
    assert {chosen(other, (8192, 1024)), chosen(other, device="two"), chosen(other, text="other")} == {"one"}
    assert other.asked == 3


@pytest.mark.parametrize("content", [b"{", b"7", b'"four"', b"\xff"])
def test_an_answer_that_names_no_candidate_is_timed_again(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    put = cache.put
    with monkeypatch.context() as changed:
        changed.setattr(cache, "put", lambda key, files: put(key, dict.fromkeys(files, content)))
        assert chosen(Clock(1.0, 2.0, 3.0)) == "one"
    assert chosen(again := Clock(2.0, 1.0, 3.0)) == "two" and again.asked == 1


def test_ties_and_refusals_leave_what_was_scheduled() -> None:
    assert chosen(Clock(1.0, 1.0, 1.0)) == "one"
    assert chosen(Clock(1.0, float("inf"), float("inf")), text="refused") == "one"


def test_buckets_are_powers_of_two() -> None:
    assert tune.bucket((4096, 8191, 1, 0)) == (13, 13, 1, 0)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The warps of every launch, Triton and the GPU stubbed."""
    seen: list[int] = []

    def launcher(kernel: Any, text: str, backend: str, device: Any = None) -> Any:
        return lambda arguments, grid: seen.append(kernel.num_warps)

    monkeypatch.setattr(launch, "launcher", launcher)
    monkeypatch.setattr(targets, "target_for", lambda backend, device: TARGETS["cuda:90"])
    return seen


def called(calls: int) -> None:
    fast: Any = fusegrad.compile(RMSNorm, backend="triton")
    for _ in range(calls):
        fast.apply(leaf(64, 4096).detach(), torch.ones(4096), 1e-6)


def test_the_fastest_serves_from_the_first_call_on(launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(3.0, 1.0, 2.0)
    monkeypatch.setattr(tune, "time_by_events", clock)
    with fusegrad.config.patch(tune=True):
        called(6)
    trials, served = launched[:3], launched[3:]
    assert clock.asked == 1 and len(served) == 6 and set(served) == {trials[1]} and trials[1] == 2 * trials[0]


class Attention(torch.autograd.Function):
    """Scores that are summed tile by tile."""

    @staticmethod
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT, -1) @ v

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


def test_a_stream_has_other_rows_blocks_warps_and_loads(launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tiles and the library's call; the one that the clock names serves."""
    monkeypatch.setattr(tune, "time_by_events", clock := Clock(6.0, 5.0, 7.0, 4.0, 3.0, 1.0, 2.0))
    fast: Any = fusegrad.compile(Attention, backend="triton")
    with fusegrad.config.patch(tune=True), tune.record_trials() as trials:
        for _ in range(2):
            fast.apply(*(torch.zeros(256, 512, 64, dtype=torch.bfloat16) for _ in range(3)))
    inner, trial = trials  # what is between the library's calls is tuned by itself
    blocks = ("longer blocks of the stream", "shorter blocks of the stream")
    tiles = ("more loads in flight", "tiles by descriptors", *blocks)
    assert trial.candidates == (OWN, *tiles, "fewer rows and warps", LIBRARY) and clock.asked == 2
    assert trial.chosen == "fewer rows and warps" and OWN in inner.candidates
    assert launched[-2:] == [4, 4] and 8 in launched, "half of the warps that are scheduled"


def test_nothing_is_timed_unless_asked_for(launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(3.0, 1.0, 2.0)
    monkeypatch.setattr(tune, "time_by_events", clock)
    called(2)
    assert len(launched) == 2 and clock.asked == 0


def test_a_function_is_tuned_in_both_directions(launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(3.0, 1.0, 2.0)
    monkeypatch.setattr(tune, "time_by_events", clock)
    monkeypatch.setattr(tuning, "_gpu", lambda: "a GPU")
    fast = fusegrad.compile(RMSNorm, backend="triton")
    found = tuning.tune_function(fast, "f32[64,4096]", "f32[4096]", 1e-6)
    assert {t.kernel for t in found.trials} == {"RMSNorm_forward", "RMSNorm_backward"}
    timed = {len(t.candidates): (3.0, 1.0, 2.0)[: len(t.candidates)] for t in found.trials}
    assert all(t.chosen == t.candidates[1] and t.milliseconds == timed[len(t.candidates)] for t in found.trials)
    again = tuning.tune_function(fast, "f32[64,4096]", "f32[4096]", 1e-6)
    assert all(t.milliseconds is None and t.chosen == t.candidates[1] for t in again.trials)
    assert clock.asked == len(found.trials) and not tune.is_tuning()
    text = str(found)
    assert "RMSNorm on a GPU" in text and "1000.0 us  <- chosen" in text and found.to_dict()["device"] == "a GPU"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(UnsupportedBackendError, match="there is no GPU on which kernels could be timed"):
        tuning.tune_function(fusegrad.compile(RMSNorm), "f32[64,256]", "f32[256]", 1e-6)
