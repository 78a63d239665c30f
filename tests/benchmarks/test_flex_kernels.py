"""FlexAttention's kernels, lowered and compiled without a GPU."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from fusegrad.benchmarks.flex_kernels import FLEXED, flex_kernels
from fusegrad.benchmarks.inductor import pretend_gpu
from fusegrad.benchmarks.plans import TARGET


@pytest.mark.parametrize("name", FLEXED)
def test_each_case_has_hot_loops(name: str) -> None:
    """In a process of its own: it sees a GPU that is not there for the rest of its life."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=pretend_gpu) as process:
        (row,) = process.map(flex_kernels, [name])
    forward, backward = row["targets"][TARGET].values()
    kinds = 1 if "causal" not in name and not name.startswith(("ALiBi", "SoftcapWindow")) else 2
    assert len(forward["hot"]) == kinds  # whole blocks and masked ones
    assert len(backward["hot"]) == 2 * kinds  # for dq, and for dk and dv
    assert all(issued > 0 and done > 0 for need in (forward, backward) for issued, done in need["hot"])
