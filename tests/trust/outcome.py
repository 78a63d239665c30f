"""What a long run measured, as JSON in benchmarks/results/trust: the numbers, and under what they were measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "trust"


def surroundings() -> dict[str, Any]:
    """Commit, date, versions and the machine, in words."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    versions = {name: metadata.version(name) for name in ("torch", "triton") if _is_here(name)}
    return {
        "commit": commit.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), **versions},
        "machine": f"{platform.machine()} {platform.system()}, {len(os.sched_getaffinity(0))} cores, no GPU used",
    }


def _is_here(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def write(name: str, numbers: dict[str, Any]) -> Path:
    """benchmarks/results/trust/NAME.json"""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**surroundings(), **numbers}, indent=1) + "\n", encoding="utf-8")
    return path
