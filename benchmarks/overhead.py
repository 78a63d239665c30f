"""Host microseconds per call beside its peers: tiny tensors, one thread, launches stubbed and counted.

The least processor time of many rounds, in each of which every peer has its turn, with the middle half of them beside
it: other processes only ever add to it.

    python -m fusegrad.benchmarks.overhead          an RMSNorm, every peer
    python -m fusegrad.benchmarks.overhead styles   ways of writing and calling a Function, beside eager
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from . import host
from .statistics import spread
from .styles import STYLES

WHAT = ("forward", "both", "no_grad")
REPEATS = 50
ROUNDS = 100
STYLE_ROUNDS = 30


def overhead(name: str = "RMSNorm") -> dict[str, Any]:
    """{peer: {forward, both, no_grad: {least, lower, upper}}} measured in a fresh process; of styles, one per style."""
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {"function": name, **json.loads(done.stdout.strip().rpartition("\n")[2])}


def measured_styles() -> dict[str, Any]:
    """{style: {peer: {forward, both}}}: the least microseconds of each."""
    torch.set_num_threads(1)
    with host.stubbed():
        calls = {
            (style, peer, what): call
            for style, described in STYLES.items()
            for peer, apply in described.peers().items()
            for what, call in described.calls(apply).items()
        }
        for call in calls.values():
            for _ in range(20):
                call()
        samples = _rounds(calls, STYLE_ROUNDS)
    found: dict[str, Any] = {}
    for (style, peer, what), rounds in samples.items():
        found.setdefault(style, {}).setdefault(peer, {})[what] = min(rounds)
    return {"styles": found}


def measured() -> dict[str, Any]:
    """The rounds, and how many launches a call of ours makes."""
    torch.set_num_threads(1)
    with host.stubbed() as recorder:
        calls = {(p, w): c for p in host.PEERS for w, c in zip(WHAT, host._calls(host._peer(p)), strict=True)}
        for call in calls.values():
            for _ in range(20):
                call()
        samples = _rounds(calls)
        recorder.launches.clear()
        recorder.recording = True
        calls["triton", "both"]()
        launches = len(recorder.launches)
    peers: dict[str, Any] = {p: {w: _row(samples[p, w]) for w in WHAT} for p in host.PEERS}
    return {"launches": launches, "peers": peers}


def _rounds(calls: Mapping[Any, host.Call], rounds: int = ROUNDS) -> dict[Any, list[float]]:
    samples: dict[Any, list[float]] = {key: [] for key in calls}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for key, call in calls.items():
            start = time.thread_time()
            for _ in range(REPEATS):
                call()
            samples[key].append((time.thread_time() - start) / REPEATS * 1e6)
    gc.enable()
    return samples


def _row(samples: list[float]) -> dict[str, float]:
    found = spread(samples)
    return {"least": found.least, "lower": found.lower, "upper": found.upper}


if __name__ == "__main__":
    print(json.dumps(measured_styles() if sys.argv[1:] == ["styles"] else measured()))
