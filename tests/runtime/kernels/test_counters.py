"""Counters of kernels: shared by the launches of a stream, never with a captured one."""

from __future__ import annotations

import pytest
import torch

from fusegrad.runtime.kernels.arrival_counters import BOUNDARY, SPARE, ArrivalCounters


class Gpu:
    """Which stream is current, and whether it is captured."""

    stream, capturing = 1, False

    def counters(self) -> ArrivalCounters:
        return ArrivalCounters(torch.device("cpu"), lambda: self.stream, lambda: self.capturing)


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


def address(counters: ArrivalCounters, user: str = "sum", count: int = 3) -> int:
    found = counters(user, (count,), torch.int32)
    assert found.shape == (count,) and not found.any() and found.data_ptr() % BOUNDARY == 0
    return found.data_ptr()


def test_launches_of_one_stream_share_them(gpu: Gpu) -> None:
    counters = gpu.counters()
    assert address(counters) == address(counters)
    assert len({address(counters), address(counters, "other"), address(counters, count=5)}) == 3


def test_streams_do_not_share(gpu: Gpu) -> None:
    counters = gpu.counters()
    first = address(counters)
    gpu.stream = 2
    assert address(counters) != first


def test_a_captured_launch_shares_with_nothing_and_fills_no_memory(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = gpu.counters()
    warm = address(counters)
    gpu.capturing = True
    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", lambda *a, **k: pytest.fail("memory is filled within the graph"))
        captured = [address(counters) for _ in range(SPARE)]
    beyond = [counters("sum", (3,), torch.int32) for _ in range(2)]
    assert len({warm, *captured, *(t.data_ptr() for t in beyond)}) == 1 + SPARE + 2
    gpu.capturing = False
    assert address(counters) == warm


def test_a_capture_without_a_launch_before_makes_its_own(gpu: Gpu) -> None:
    counters = gpu.counters()
    gpu.capturing = True
    first = counters("sum", (3,), torch.int32)
    gpu.capturing = False
    assert counters("sum", (3,), torch.int32).data_ptr() != first.data_ptr()
