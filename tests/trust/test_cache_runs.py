"""A slice of the runs that damage the cache, kill its users and share it; and that these runs find something."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("triton")

import cache_faults
import forked
import kept_functions
import kills
import sharing
from forking import needs_torch_to_go_on

from fusegrad.runtime.cache import store as cache
from fusegrad.runtime.kernels import interpreter, triton_module


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_caches", {})


def faults(tmp_path: Path, count: int, kinds: Any = tuple(cache_faults.FILES)) -> cache_faults.Found:
    found, _ = cache_faults.run(count, 4, tmp_path, cache_faults.invented, kinds)
    assert found.mutations.total() == count
    return found


def test_faults_cost_speed_only(tmp_path: Path) -> None:
    found = faults(tmp_path, 64)
    assert found.ok, {name: getattr(found, name)[:3] for name in cache_faults.FAULTS}
    assert set(found.uses) == set(cache_faults.FILES) and len(found.mutations) > 20


def test_sums_that_are_not_compared_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegrad.runtime.cache.entry_files.sha256", lambda content: "0" * 64)
    assert faults(tmp_path, 30, ("kernel", "choice")).wrong


def test_files_that_are_run_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = triton_module.load

    def run_from_disk(text: str) -> ModuleType:
        for path in tmp_path.glob("cache/v1/entries/*/*/*.py"):
            if path.is_file():  # a pipe in its place would be waited for
                with contextlib.suppress(Exception):
                    exec(path.read_bytes(), {"__name__": "found"})
        return original(text)

    run_from_disk.cache_clear = original.cache_clear  # type: ignore[attr-defined]
    monkeypatch.setattr(triton_module, "load", run_from_disk)
    monkeypatch.setattr(interpreter, "load", run_from_disk)
    assert faults(tmp_path, 100, ("text",)).executed


def test_killed_and_started_again(tmp_path: Path) -> None:
    needs_torch_to_go_on()
    work = forked.Work(kept_functions.CLASSES[:1], kernels=False)
    found, usual = kills.run(4, 1, work, tmp_path, ("process", "call"))
    assert found.ok, found
    assert usual.calls > 50 and len(found.found_entries) > 1


def test_processes_on_one_empty_cache(tmp_path: Path) -> None:
    needs_torch_to_go_on()
    found = sharing.run(4, forked.Work(kept_functions.CLASSES[:1], kernels=False), tmp_path, "four")
    assert sharing.is_ok(found), found
    assert found["captures"] == 2 <= found["entries"]
