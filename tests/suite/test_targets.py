"""Every kernel of the suite compiles for every target, without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from functions import CASES, Case

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")


def low(case: Case, value):
    """bfloat16 where the class makes sense in it: the dtype that most kernels will run in."""
    is_float = isinstance(value, torch.Tensor) and value.dtype is torch.float32
    return value.bfloat16() if is_float and torch.bfloat16 in case.floats else value


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_kernel_compiles_for_every_target(case: Case) -> None:
    torch.manual_seed(0)
    found = fusegrad.explain(case.cls, *[low(case, a) for a in case.make(8)])
    if not found.kernel_records:
        assert case.library or case.name in ("SegmentMean",), "no kernels, and no library call that would explain it"
        return
    # AMD's kernels are other text: assembly of NVIDIA's is in those for NVIDIA's.
    amd = fusegrad.explain(case.cls, *[low(case, a) for a in case.make(8)], target="hip:gfx942")
    binaries = found.binaries(*TARGETS[:3]) | {f"amd {n}": by for n, by in amd.binaries("hip:gfx942").items()}
    assert {n for n in binaries if not n.startswith("amd ")} == {k.name for k in found.kernel_records}
    assert not [(kernel, t, b.error) for kernel, by in binaries.items() for t, b in by.items() if b.error]
    assert all(b.registers > 0 for by in binaries.values() for b in by.values())
