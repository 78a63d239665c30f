"""A sink and a prefix before the keys, beside eager."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import differences, transposed_heads
from concatenated_functions import Before, arguments

NEAR = 3
"""Calls close by that say what bfloat16 allows."""


def test_beside_eager() -> None:
    fast = fusegrad.compile(Before, backend="interpret", fullgraph=True)
    for n, r in ((30, 4),):
        given = [transposed_heads(a) for a in arguments(Before, 2, 2, n, 16, r, dtype=torch.bfloat16)]
        assert not differences(fast.apply, Before.apply, given, transposed_heads, NEAR)
