"""Time on the device and time on the wall, apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]
LONGEST_SLEEP = 400_000_000  # cycles, about a fifth of a second
CALLS_QUEUED = 20
"""Fewer launches than a stream's queue holds, whatever a call launches: the host must not wait for room in it."""


class GpuClock:
    """Milliseconds per call on the current CUDA device."""

    def __init__(self) -> None:
        self.sleep = 2_000_000
        self.properties = torch.cuda.get_device_properties(torch.cuda.current_device())

    @property
    def l2(self) -> int:
        return int(getattr(self.properties, "L2_cache_size", 0) or 50 << 20)

    def device(self, calls: Sequence[Call]) -> tuple[float, bool]:
        """(milliseconds, whether nothing but the device was timed).

        The device sleeps while the calls are queued, so that it never waits for the host; where the host takes longer
        than the longest sleep, its gaps are in the time, and the second result says so.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        while True:
            torch.cuda.synchronize()
            torch.cuda._sleep(self.sleep)
            start.record()
            for call in calls:
                call()
            end.record()
            asleep = not start.query()
            end.synchronize()
            if asleep or self.sleep >= LONGEST_SLEEP:
                return start.elapsed_time(end) / len(calls), asleep
            self.sleep *= 2

    def wall(self, calls: Sequence[Call]) -> float:
        """Milliseconds from the first call to the end of the last one's work."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for call in calls:
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / len(calls) * 1e3


@dataclass
class DryClock:
    """The same on a CPU, where the figures mean nothing: to go through the harness without a GPU."""

    l2: int = 1 << 16

    def device(self, calls: Sequence[Call]) -> tuple[float, bool]:
        return self.wall(calls), False

    def wall(self, calls: Sequence[Call]) -> float:
        began = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - began) / len(calls) * 1e3


Clock = GpuClock | DryClock
