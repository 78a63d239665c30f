"""Fast or not: cases timed beside their peers, and the schedule's choices beside their neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config

import fusegrad
from fusegrad.runtime.profile import measure
from fusegrad.runtime.profile.tuning import tune_function

from .. import gpu, gpu_report
from ..clocks import GpuClock
from ..inputs import real
from ..peers import AGAIN, OURS
from ..stream_functions import STREAMS
from ..suite import Case
from .checks import case_named
from .modelled import model_device

SEED = 11
BESIDE = {"cuda": (OURS, AGAIN, "eager", "compile", "liger"), "pretended": (OURS, AGAIN, "eager")}
BESIDE_ATTENTION = {"cuda": (OURS, AGAIN, "eager", "compile", "sdpa", "flex"), "pretended": (OURS, AGAIN, "sdpa")}
SECONDS = {"cuda": 0.2, "pretended": 0.002}
"""How long `fusegrad profile` calls each thing that it measures."""
AUTOTUNED = {"cuda": (OURS, AGAIN, "max-autotune"), "pretended": (OURS, AGAIN)}


def bench(unit: str, kind: str) -> dict[str, Any]:
    """What `make bench-gpu` does with a case, without the peer that compiles for a minute."""
    return _bench(next(c for c in gpu.chosen() if c.name == unit), kind, BESIDE[kind])


def attention(unit: str, kind: str) -> dict[str, Any]:
    """A Function whose scores are never in memory, beside torch's own attention."""
    return _bench(STREAMS[unit][1], kind, BESIDE_ATTENTION[kind])


def autotuned(unit: str, kind: str) -> dict[str, Any]:
    """The case beside torch.compile's max-autotune alone."""
    return _bench(next(c for c in gpu.chosen() if c.name == unit), kind, AUTOTUNED[kind])


def _bench(case: Case, kind: str, peers: tuple[str, ...]) -> dict[str, Any]:
    torch._functorch.config.donated_buffer = False  # else a compiled backward cannot run twice
    given = ["--peers", ",".join(peers), *(["--quick", "--rounds", "1"] if kind == "pretended" else [])]
    if kind == "pretended":  # each call is interpreted
        gpu.CALLS_QUEUED, gpu.MOST_SETS = 2, 2
    row = gpu.measured(case, gpu.parsed(given), GpuClock())
    torch._dynamo.reset()
    ours = row["checks"].get(OURS, ())
    wrong = [row["errors"][OURS]] if OURS in row["errors"] else [f for check in ours for f in check["faults"]]
    assert bool(wrong) == gpu_report.wrong(row)
    return {"faults": wrong, "row": {**row, "case": case.name}}


def profiled(unit: str, kind: str) -> dict[str, Any]:
    """What `fusegrad profile` prints, with its columns for the device."""
    case, device = case_named(unit, kind), model_device(torch.cuda.get_device_name()) or "h100"
    fast = fusegrad.compile(case.function, backend="triton")
    with small_flushes() if kind == "pretended" else nullcontext():
        found = fusegrad.profile(fast, *real(case, SEED, "cuda"), device=device, seconds=SECONDS[kind], progress=False)
    return {"said": str(found).splitlines()}


EMPTIED = "get_empty_cache_for_benchmark"
"""The method of Triton's driver that makes what empties the L2."""


@contextmanager
def small_flushes() -> Iterator[None]:
    """On the pretended GPU there is no L2 to be emptied, and no bandwidth of a copy."""
    from triton.runtime import driver

    def emptied(_: Any) -> torch.Tensor:
        return torch.empty(256, dtype=torch.int32, device="cuda")

    with patch.object(measure, "FLUSH", 1 << 16), patch.object(type(driver.active), EMPTIED, emptied):
        yield


def tune(unit: str, kind: str) -> dict[str, Any]:
    """Every kernel's candidates with their milliseconds, and the choice; the case's own values: labels are classes."""
    case = case_named(unit, kind)
    fast = fusegrad.compile(case.function, backend="triton")
    return {"trials": tune_function(fast, *real(case, SEED, "cuda")).to_dict()["trials"]}
