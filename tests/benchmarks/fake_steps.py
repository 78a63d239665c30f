"""Bodies of steps that do nothing, or nothing good: for the tests of a GPU's day."""

from __future__ import annotations

import os
import time
from typing import Any


def mixed(unit: str, kind: str) -> dict[str, Any]:
    """What the unit is called."""
    print(f"at {unit}", flush=True)
    if unit == "raises":
        raise ValueError("no such thing\nand more")
    if unit == "hangs":
        time.sleep(600)
    if unit == "dies":
        os._exit(7)
    if unit == "no memory":
        raise MemoryError("OutOfMemoryError: for a moment")
    if unit == "where":
        return {"faults": [__file__], "folder": os.path.expanduser("~/x")}
    facts: dict[str, Any] = {"kind": kind, "process": os.getpid()}
    return {**facts, "faults": ["0: off"]} if unit == "wrong" else {"skipped": "x"} if unit == "skips" else facts


def hangs_by_number(unit: str, kind: str) -> dict[str, Any]:
    """Says who hangs: its process is to be found."""
    with open(os.environ["NUMBER"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
    return {}


def first_is_missing(unit: str, kind: str) -> dict[str, Any]:
    """Right once the file that the environment names is there: a fault that a commit has corrected."""
    return {"faults": [] if os.path.exists(os.environ["CORRECTED"]) else ["not yet"]}
