"""Processor time on large CPU tensors in float32, one thread: eager, `reference`, and `inductor` beside torch.compile.

Every case in a process of its own with glibc's own thresholds, then in another one that keeps freed large blocks. The
least of several rounds, in each of which every peer has its turn: other processes only ever add to it.

    python -m fusegrad.benchmarks.cpu "SwiGLU[4096,4096]"
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import fusegrad
from fusegrad.runtime.settings.config import KEEPS_MEMORY

from . import functions as f
from .inputs import as_list, cotangents, differentiable, real
from .suite import Case

Call = Callable[[], Any]
WHAT = ("forward", "both")
STATES = ("", " recycling")
ROUNDS, LEAST = 4, 0.05
"""Rounds, and the seconds that a round of small calls takes at least."""
UNTIL_WRITTEN = 5
"""Calls after which forward and backward are written out."""
X, ROW, COLUMN = "f32[4096,4096]", "f32[4096]", "i64[4096]"


def _large(function: type, *args: Any, shape: str = "4096,4096") -> Case:
    return Case(function, shape, args)


LARGE = [
    _large(f.SwiGLU, X, X),
    _large(f.GeGLU, X, X),
    _large(f.SquaredReLU, X),
    _large(f.BiasGELU, X, ROW),
    _large(f.DropoutBiasResidual, "f32[512,1024]", "f32[1024]", "f32[512,1024]", "i64[1]", 0.1, shape="512,1024"),
    _large(f.RMSNorm, X, ROW, 1e-6),
    _large(f.AddRMSNorm, X, X, ROW, 1e-6),
    _large(f.LayerNorm, X, ROW, ROW, 1e-5),
    _large(f.DyT, X, "f32[1]", ROW, ROW),
    _large(f.GroupNorm, "f32[8,512,64,64]", "f32[512]", "f32[512]", 32, 1e-5, shape="8,512,64,64"),
    _large(f.RMSNormFP8, X, ROW, 1e-6),
    _large(f.PolyNorm, X, "f32[3]", "f32[1]", 1e-6),
    _large(f.Softmax, X),
    _large(f.CausalSoftmax, X),
    _large(f.ColumnSoftmax, X),
    _large(f.CrossEntropy, X, COLUMN, -100),
    _large(f.SmoothedCrossEntropy, X, COLUMN, 0.1, 1e-4, 30.0),
    _large(f.KLDivergence, X, X),
    _large(f.JSDivergence, X, X, 0.5),
    _large(f.TotalVariation, X, X),
    _large(f.RoPE, "f32[1,4096,32,128]", "f32[4096,64]", "f32[4096,64]", shape="1,4096,32,128"),
    _large(f.FusedLinearCrossEntropy, "f32[512,1024]", "f32[8192,1024]", "i64[512]", 128, shape="512,1024x8192"),
]
"""About 16 million numbers, but for products and for random numbers that eager makes of 64-bit integers."""
TINY = [
    Case(f.SwiGLU, "8,16", ("f32[8,16]", "f32[8,16]")),
    Case(f.RMSNorm, "8,16", ("f32[8,16]", "f32[16]", 1e-6)),
    Case(f.Softmax, "8,16", ("f32[8,16]",)),
]
THROUGH_INDUCTOR = {f.SwiGLU, f.RMSNorm, f.Softmax}
BY_NAME = {case.name: case for case in (*LARGE, *TINY)}


def cases(pattern: str = "", quick: bool = False) -> list[Case]:
    """Those whose names contain `pattern`; quick: what goes through Inductor alone."""
    return [c for c in (*TINY, *LARGE) if pattern in c.name and (not quick or c.function in THROUGH_INDUCTOR)]


def cpu(case: Case) -> dict[str, Any]:
    """{case, milliseconds: {peer: {forward, both, forward recycling, both recycling}}}, from fresh processes."""
    command = [sys.executable, "-m", "fusegrad.benchmarks.cpu", case.name]
    found: dict[str, dict[str, float]] = {}
    for state in STATES[: 1 if case in TINY else None]:
        variable, _, thresholds = KEEPS_MEMORY.partition("=")
        environment = os.environ | ({variable: thresholds} if state else {})
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            return {"case": case.name, "error": done.stderr.strip().rpartition("\n")[2]}
        for peer, times in json.loads(done.stdout.strip().rpartition("\n")[2]).items():
            found.setdefault(peer, {}).update({what + state: least for what, least in times.items()})
    return {"case": case.name, "milliseconds": found}


def measured(case: Case) -> dict[str, dict[str, float]]:
    """Milliseconds of processor time per peer and direction."""
    torch.set_num_threads(1)
    calls = {(peer, what): call for peer, apply in _peers(case).items() for what, call in _calls(case, apply).items()}
    for (_, what), call in calls.items():
        for _ in range(UNTIL_WRITTEN if what == "both" or case in TINY else 1):
            call()
    found: dict[str, dict[str, float]] = {}
    for (peer, what), least in _least(calls).items():
        found.setdefault(peer, {})[what] = least
    return found


def _peers(case: Case) -> dict[str, Callable[..., Any]]:
    function: Any = case.function
    peers = {"eager": function.apply, "reference": fusegrad.compile(function, backend="reference").apply}
    if case.function in THROUGH_INDUCTOR:
        peers["compile"] = torch.compile(function.apply, dynamic=False)
        peers["inductor"] = fusegrad.compile(function, backend="inductor").apply
    return peers


def _calls(case: Case, apply: Callable[..., Any]) -> dict[str, Call]:
    args = real(case, 0)
    wanted = differentiable(args)
    gradients = cotangents(as_list(apply(*args)), 1)

    def both() -> Any:
        ends = differentiable(as_list(apply(*args)))
        return torch.autograd.grad(ends, wanted, gradients, allow_unused=True)

    return {"both": both, "forward": lambda: apply(*args)}


def _least(calls: Mapping[Any, Call]) -> dict[Any, float]:
    repeats = {key: max(1, int(LEAST / _seconds(call, 1))) for key, call in calls.items()}
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for key, call in calls.items():
            best[key] = min(best[key], _seconds(call, repeats[key]) * 1e3)
    return best


def _seconds(call: Call, repeats: int) -> float:
    began = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - began) / repeats


if __name__ == "__main__":
    print(json.dumps(measured(BY_NAME[sys.argv[1]])))
