"""`make test` takes a sample of the longest tables of cases, always the same; FUSEGRAD_TESTS=all takes them all."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

ONE_IN = {
    "compose": 2,
    "conformance/test_conformance.py": 3,
    "contract/test_wrong_backwards.py": 2,
    "cpp": 2,
    "interop": 2,
    "suite/test_derived.py": 2,
    "suite/test_linearity.py": 2,
}
"""Folders and files by how many of their parametrised cases stand for one that is taken."""
HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("FUSEGRAD_TESTS") == "all":
        return
    left = [item for item in items if not _taken(item)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if _taken(item)]


def _taken(item: pytest.Item) -> bool:
    place = item.path.relative_to(HERE).as_posix() if item.path.is_relative_to(HERE) else ""
    share = next((n for where, n in ONE_IN.items() if place == where or place.startswith(f"{where}/")), 1)
    return "[" not in item.name or zlib.crc32(item.nodeid.encode()) % share == 0
