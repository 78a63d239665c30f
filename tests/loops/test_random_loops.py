"""A short slice of the random programs with loops; the long run is `python tests/loops/fuzz_loops.py`."""

from __future__ import annotations

import pytest
from fuzz_loops import try_one

VERDICTS = ("rolled", "stepwise", "eager", "invalid")


@pytest.mark.parametrize("seed", range(24))
def test_random_loops_are_those_of_eager(seed: int) -> None:
    assert try_one(seed) in VERDICTS


@pytest.mark.parametrize("seed", [*range(50000, 50007), 50018, 50019])
def test_random_loops_in_kernels(seed: int) -> None:
    pytest.importorskip("triton")
    assert try_one(seed, "interpret") in VERDICTS


def test_a_call_in_what_could_leave_a_loop() -> None:
    """A matmul leaves a loop with what reads it, but for a call of which it is not known what it is for all steps."""
    pytest.importorskip("triton")
    assert try_one(72009, "interpret") == "rolled"


@pytest.mark.parametrize("seed", [61013, 61291, 61312])
def test_what_is_returned_lies_in_memory_as_in_eager(seed: int) -> None:
    """Gradients by columns, a state that is one number for all places, a row of a buffer in another order."""
    assert try_one(seed) in VERDICTS


def test_pieces_of_one_result_share_a_kernel() -> None:
    """A list of which some elements are returned besides, and others walk along what a third result does."""
    pytest.importorskip("triton")
    assert try_one(311180, "interpret") == "stepwise"
