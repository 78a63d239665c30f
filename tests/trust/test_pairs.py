"""A slice of `pairs.py`: random worlds for every subject, in one process and on disk; `make guards N=...` runs many."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import pairs

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def switches_of_torch_may_be_set() -> Iterator[None]:
    """torch.testing's own tests take the right away for the whole process."""
    with torch.backends.__allow_nonbracketed_mutation():
        yield


@pytest.mark.parametrize("subject", pairs.SUBJECTS)
def test_nothing_of_another_world_is_served(subject: str) -> None:
    failure, calls, _ = pairs.trial(1000, "reference", subject)
    assert failure is None, failure
    assert calls > 3


@pytest.mark.parametrize("subject", pairs.STORED)
def test_nothing_of_another_world_comes_from_disk(subject: str) -> None:
    pytest.importorskip("triton")
    failure, *_ = pairs.stored_trial(1001, None, subject)
    assert failure is None, failure


def test_a_stale_capture_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worlds are seen to differ: a class that never looks at what it reads is caught."""
    from fusegrad.tracer.reads.reads import Read

    monkeypatch.setattr(Read, "fact", lambda read: ("id",))
    found = [pairs.trial(seed, "reference", "a global number")[0] for seed in range(4)]
    assert any(failure is not None for failure in found)
