"""Large blocks that the process keeps: glibc's own thresholds do it, and the switch of ours that did says so."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Any

import pytest

from fusegrad import config
from fusegrad.runtime.settings.config import KEEPS_MEMORY

VARIABLE, _, THRESHOLDS = KEEPS_MEMORY.partition("=")
COUNT = """
import resource, torch
torch.set_num_threads(1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(), faults()
print(faults())
"""


def output(text: str, *options: str) -> str:
    run = subprocess.run([sys.executable, *options, "-c", text], capture_output=True, text=True, check=True)
    return run.stdout + run.stderr


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_with_the_documented_thresholds_freed_blocks_cause_fewer_page_faults(monkeypatch: Any) -> None:
    usual = int(output(COUNT))
    monkeypatch.setenv(VARIABLE, THRESHOLDS)
    kept = min(int(output(COUNT)) for _ in range(3))  # where a heap has no room to grow, that process keeps less
    assert kept * 2 < usual, "page faults of four blocks of 64 MB"


def test_the_old_switch_does_nothing_and_names_what_does() -> None:
    for asked in ((), (True,), (False,)):
        with pytest.warns(DeprecationWarning, match="GLIBC_TUNABLES=glibc.malloc.mmap_threshold"):
            config.recycle_memory(*asked)


def test_the_old_variable_warns_when_fusegrad_is_imported(monkeypatch: Any) -> None:
    monkeypatch.setenv("FUSEGRAD_RECYCLE_MEMORY", "1")
    said = output("import fusegrad", "-W", "always::DeprecationWarning")
    assert "FUSEGRAD_RECYCLE_MEMORY does nothing any more" in said and "GLIBC_TUNABLES" in said
