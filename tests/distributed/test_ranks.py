"""Compiled Functions on real process groups (gloo, CPU): DTensor, DDP, FSDP2, tensor parallel; `on_ranks.py` has them.

torchrun starts two processes for most checks; the four of the others are forked, since starting is most of the time.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = HERE / "on_ranks.py"
EVERY = os.environ.get("FUSEGRAD_TESTS") == "all"
CHECKS = [
    (many if EVERY and many else few, name)
    for many, few, name in re.findall(
        r"^@check\((?:(\d) if EVERY else )?(\d)\)\ndef (\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE
    )
]
SECONDS = 280


@functools.cache
def answers(ranks: int) -> dict[str, list[str]]:
    """What each check found on each rank: nothing, or a traceback."""
    answer = Path(os.environ["PYTEST_ANSWERS"]) / f"{ranks}.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks == 2 else []
    command = [sys.executable, *launcher, SCRIPT, answer, *(() if launcher else ("--fork", str(ranks)))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(answer.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ANSWERS", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(("ranks", "name"), CHECKS, ids=lambda v: str(v))
def test_on_ranks(ranks: str, name: str, folder: None) -> None:
    found = answers(int(ranks))[name]
    assert len(found) == int(ranks) and not any(found), "\n".join(f for f in found if f)[-4000:]
