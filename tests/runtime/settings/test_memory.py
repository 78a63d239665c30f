"""Large blocks that the process keeps: on, off, and where it cannot be had."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest

from fusegrad import config
from fusegrad.runtime.settings import malloc as memory

COUNT = """
import resource, torch, fusegrad
from fusegrad.runtime.settings import malloc as memory
torch.set_num_threads(1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
on = memory.state().recycles
if on:
    faults()
kept = faults()
memory.recycle(False)
print(on, kept, faults(), memory.state().recycles)
"""
possible = pytest.mark.skipif(not memory.state().possible, reason=memory.state().why)


@possible
def test_recycled_blocks_cause_no_page_faults_and_can_be_given_back(monkeypatch: Any) -> None:
    monkeypatch.setenv(memory.VARIABLE, "1")
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    on, kept, after, still = done.stdout.split()
    assert (on, still) == ("True", "False")
    assert int(kept) * 4 < int(after), "page faults of four blocks of 64 MB"


def test_another_c_library_is_a_refusal_with_one_warning(monkeypatch: Any) -> None:
    monkeypatch.setattr(memory, "_libc", lambda: object())
    monkeypatch.setattr(memory, "_warned", False)
    with pytest.warns(memory.RecyclingWarning, match="not glibc"):
        found = config.recycle_memory()
    assert not found.recycles and not found.possible and "glibc" in found.why
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config.recycle_memory() == found == config.recycle_memory(False)
        memory.release()


@possible
def test_another_allocator_in_the_process_is_a_refusal(monkeypatch: Any) -> None:
    addresses = iter((1, 2))
    monkeypatch.setattr(memory, "_address", lambda function: next(addresses))
    assert "another allocator" in memory.state().why


@possible
def test_state_tells_how_to_turn_it_on() -> None:
    assert memory.VARIABLE in memory.state().why
