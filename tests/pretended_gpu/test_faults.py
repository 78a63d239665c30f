"""What a GPU refuses, what outlives a class, and what another thread has to know: no test on a CPU sees these."""

from __future__ import annotations

from typing import Any

import pytest

INVALID, OUT_OF_MEMORY, OUT_OF_RESOURCES = 1, 2, 701


@pytest.mark.parametrize("code", [INVALID, OUT_OF_MEMORY, OUT_OF_RESOURCES])
def test_a_refused_launch(code: int, play: Any) -> None:
    assert play("refused", code=code)


@pytest.mark.parametrize("scene", [
    "illegal_address", "too_many_threads", "out_of_memory", "captured_launch_outlives_its_class",
    "first_call_in_a_pool", "settings_in_backward", "tuned_in_backward",
])  # fmt: skip
def test_a_fault(scene: str, play: Any) -> None:
    play(scene)


def test_threads(play: Any) -> None:
    """Tracing needs no thread of the engine's: one that waits for a capture never keeps it from ending."""
    assert play("threads", count=16)
