"""A process of the day: reads units, a line of JSON each, does them, and answers a line each.

    python -P worker.py cuda fusegrad.benchmarks.gpu_day.checks:suite
    {"unit": "RMSNorm[4096,4096]"}
    {"outcome": "ok", "facts": {...}, "faults": [], "seconds": 4.2, "spoiled": false}

`spoiled`: the device answers no more (an illegal access, for example), so that the next unit needs another process.
Imports nothing of fusegrad's before the pretended GPU is there, which has to come before torch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Body = Callable[[str, str], Mapping[str, Any]]
"""(unit, kind of device) -> facts; "faults": what is wrong; "skipped": why there was nothing to do."""
PDEATHSIG = 1
PRETENDED = Path(__file__).resolve().parents[2] / "tests" / "pretended_gpu"


def answer(body: Body, unit: str, kind: str) -> dict[str, Any]:
    """What became of one unit."""
    began, pretended = time.monotonic(), sys.modules.get("launches")
    if pretended:
        pretended.launches.clear(), pretended.problems.clear()
    found: dict[str, Any]
    try:
        facts = dict(body(unit, kind))
        found = {"faults": list(facts.pop("faults", ())), "facts": facts}
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        first = (str(error).splitlines() or [""])[0]
        found = {"faults": [f"{type(error).__name__}: {first}"[:400]], "facts": {}, "outcome": "failed"}
    if pretended:
        found["facts"]["launches"] = len(pretended.launches)
        found["faults"] += pretended.problems
    found.setdefault("outcome", _outcome(found))
    return {**found, "seconds": round(time.monotonic() - began, 2), "spoiled": _spoiled()}


def _outcome(found: Mapping[str, Any]) -> str:
    return "wrong" if found["faults"] else "skipped" if "skipped" in found["facts"] else "ok"


def _spoiled() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception as error:
        print(f"the device answers no more: {error}", file=sys.stderr, flush=True)
        return True
    return False


def main(kind: str, body: str) -> None:
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)  # a device is not held for a program that was ended
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a body prints is no answer
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # asked for before it is ended: where it hangs
    if kind == "pretended":
        sys.path.insert(0, str(PRETENDED))
        importlib.import_module("launches")
    module, _, name = body.partition(":")
    run = getattr(importlib.import_module(module), name)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(run, json.loads(line)["unit"], kind), default=str), file=answers, flush=True)
    answers.flush()
    os._exit(0)  # threads that hang, and a device that is spoiled, do not hold it


if __name__ == "__main__":
    main(*sys.argv[1:])
