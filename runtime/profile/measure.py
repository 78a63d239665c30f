"""Times of calls: of a CPU by the wall clock, of a GPU by its own events, with its L2 emptied before each call."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..compiled.options import is_triton_installed

Tensor = torch.Tensor
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler tells of each start and stop on stderr otherwise
WARM_UP = 5
FEWEST, MOST = 10, 2000
NOISY = 0.1  # of the median, as in torch.utils.benchmark
FLUSH = 256 << 20  # bytes, more than any L2


@dataclass(frozen=True)
class Times:
    """Microseconds per call: the median, the bounds of the middle four fifths, and the width of the middle half."""

    median: float
    """Microseconds per call, the median."""
    p10: float
    """Microseconds: a tenth of the calls were faster."""
    p90: float
    """Microseconds: a tenth of the calls were slower."""
    calls: int
    """How many were timed."""
    iqr: float = 0.0
    """Microseconds: the width of the middle half of the calls."""

    @property
    def noisy(self) -> bool:
        """True if the interquartile range is more than a tenth of the median."""
        return self.iqr > NOISY * self.median

    @property
    def spread(self) -> float:
        """The upper of both bounds over the lower."""
        return self.p90 / self.p10 if self.p10 else float("inf")


def times_of(call: Callable[[], Any], device: torch.device, seconds: float) -> Times:
    """Warm up, then call for so long (ten times at least)."""
    for _ in range(WARM_UP):
        call()
    on_gpu = device.type == "cuda"
    by_events = on_gpu and is_triton_installed()
    return summary(_by_events(call, seconds) if by_events else _by_clock(call, seconds, on_gpu))


def _by_clock(call: Callable[[], Any], seconds: float, on_gpu: bool) -> list[float]:
    """Microseconds of single calls; of a GPU without triton until their work is done.

    Not by torch.utils.benchmark.Timer: it times a millisecond of short calls at once, and on a machine that does other
    things, too, most of its blocks hold an interruption. The median of single calls does not see them.
    """
    stop, samples = time.perf_counter() + seconds, list[float]()
    while len(samples) < FEWEST or (time.perf_counter() < stop and len(samples) < MOST):
        began = time.perf_counter_ns()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        samples.append((time.perf_counter_ns() - began) / 1e3)
    return samples


def _by_events(call: Callable[[], Any], seconds: float) -> list[float]:
    """Microseconds of single calls by Triton's do_bench, which empties the L2 before each, and lets calls queue up."""
    from triton.testing import do_bench

    samples: list[float] = []
    while len(samples) < FEWEST:
        samples += do_bench(call, rep=1e3 * seconds, return_mode="all")
    return [1e3 * milliseconds for milliseconds in samples]


def summary(samples: Sequence[float]) -> Times:
    """Of at least one sample."""
    ordered = sorted(samples)
    p10, p25, median, p75, p90 = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.25, 0.5, 0.75, 0.9))
    return Times(median, p10, p90, len(ordered), p75 - p25)


def copy_bandwidth(device: torch.device, seconds: float) -> float | None:
    """Bytes per second of a copy of 256 MB, read and written; None on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.empty(FLUSH, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * FLUSH / times_of(lambda: target.copy_(source), device, min(seconds, 0.2)).median * 1e6


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """The most memory that a call holds at a time, its results included, above what there was."""
    return _peak_on_gpu(call, device) if device.type == "cuda" else _peak_on_cpu(call)


def _peak_on_gpu(call: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(call: Callable[[], Any]) -> int:
    """As torch's allocator tells its profiler; what numpy or a library allocates itself is not seen."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        results = call()
    del results
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    return max(itertools.accumulate(count for _, count in changes), default=0)


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Within: the bytes of the saved tensors, inputs among them, each piece of memory once."""
    total, counted = [0], set[int]()
    alive: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in counted:
            counted.add(memory.data_ptr())
            alive.append(tensor)
            total[0] += memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


def operations(run: Callable[[], Any], device: torch.device, calls: int = 10) -> tuple[list[dict[str, Any]], Any]:
    """The operations that one call runs on the device, by torch's profiler; and the profiler, for its trace."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    run()  # what only a first call does is not counted
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(calls):
            run()
    spent = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    rows = [
        {"name": e.key, "calls": e.count / calls, "microseconds": getattr(e, spent) / calls}
        for e in profiler.key_averages()
        if getattr(e, spent) > 0
    ]
    return sorted(rows, key=lambda row: -row["microseconds"]), profiler
