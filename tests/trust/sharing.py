"""Processes that begin at the same moment on one empty cache: all right, each entry made once.

    python tests/trust/sharing.py --processes 16 --rounds 3 --json

Each calls the same classes forward and backward and compiles the same kernels. What is made is counted by the cache's
own log ("written"), by the counter of captures, and at the door of the compile workers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import forked
import outcome

PATIENCE = 300.0


def together(count: int, work: forked.Work, root: Path) -> list[dict[str, Any]]:
    """The answers of `count` processes on one empty cache."""
    gate = os.pipe()
    started = [forked.Forked(work, root, root.name, gate) for _ in range(count)]
    time.sleep(0.2)
    for end in gate:
        os.close(end)
    return [told(each) for each in started]


def told(process: forked.Forked) -> dict[str, Any]:
    status = process.wait(PATIENCE)
    return process.answer() or {"error": f"it ended with status {status}" if status is not None else "it hung"}


def judged(answers: list[dict[str, Any]], alone: dict[str, Any], token: str) -> dict[str, Any]:
    """What differs from one process alone, and how often each entry was made."""
    right = [a for a in answers if "error" not in a]
    written = Counter(key for a in right for key in a["written"])
    compiled = Counter(name for a in right for name in a["compiled"])
    return {
        "processes": len(answers),
        "failed": [a["error"] for a in answers if "error" in a],
        "wrong": sum(a["tensors"] != alone["tensors"] or a["binaries"] != alone["binaries"] for a in right),
        "warnings": sum(len(a["warnings"]) for a in right),
        "entries": len(written), "entries_alone": len(alone["written"]),
        "written_twice": sorted(key for key, n in written.items() if n > 1),
        "kernels": len(alone["compiled"]), "compiled": compiled.total(),
        "captures_alone": alone["captures"], "captures": sum(a["captures"] for a in right),
        "orphans": len(forked.left_after(token, 10.0)),
    }  # fmt: skip


def is_ok(found: dict[str, Any]) -> bool:
    """All right, and everything made once."""
    counts = found["compiled"] == found["kernels"] and found["captures"] == found["captures_alone"]
    same = found["entries"] == found["entries_alone"] and counts
    return same and not any(found[n] for n in ("failed", "wrong", "warnings", "written_twice", "orphans"))


def run(count: int, work: forked.Work, folder: Path, name: str) -> dict[str, Any]:
    """One process alone on a cache of its own, then `count` on another."""
    (alone,) = together(1, work, folder / f"{name}-alone")
    began = time.perf_counter()
    answers = together(count, work, folder / name)
    seconds = round(time.perf_counter() - began, 1)
    return {**judged(answers, alone, name), "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/trust/sharing.json")
    options = parser.parse_args()
    work = forked.Work()
    with tempfile.TemporaryDirectory() as folder:
        rounds = [run(options.processes, work, Path(folder), f"round{i}") for i in range(options.rounds)]
    for each in rounds:
        print(json.dumps(each))
    if options.json:
        print(outcome.write("sharing", {"rounds": rounds}))
    return 0 if all(map(is_ok, rounds)) else 1


if __name__ == "__main__":
    sys.exit(main())
