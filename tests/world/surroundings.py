"""Commit, date, versions and the machine of a run, in words."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

FOLDERS = re.compile(r"(?<![\w.])(/[\w.+-]+)+/")


def placeless(fact: Any) -> Any:
    """A fact without the folders that its texts name: those of one machine."""
    return json.loads(FOLDERS.sub("", json.dumps(fact)))


def surroundings() -> dict[str, str]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "commit": commit.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "versions": f"Python {platform.python_version()}, torch {version('torch')}, triton {version('triton')}",
        "machine": f"{platform.machine()} {platform.system()}, {len(os.sched_getaffinity(0))} cores, no GPU used",
    }


def version(name: str) -> str:
    """Of an installed distribution; "absent"."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
