"""Registers behind the keys, in forward mode."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import error
from concatenated_functions import Behind, arguments

Tensor = torch.Tensor


def plain(q: Tensor, k: Tensor, v: Tensor, rk: Tensor, rv: Tensor) -> Tensor:
    return torch.softmax(q @ torch.cat([k, rk], 2).mT / 4, -1) @ torch.cat([v, rv], 2)


def test_forward_mode() -> None:
    given = [a.detach() for a in arguments(Behind, 1, 2, 19, 16, 2)]
    fast = fusegrad.compile(Behind, backend="interpret").apply
    found, exact = (
        tree_leaves(torch.func.jvp(call, tuple(x), tuple(a / 2 + 0.3 for a in x)))
        for call, x in ((fast, given), (plain, [a.double() for a in given]))
    )
    assert all(error(f, e) < 1e-5 for f, e in zip(found, exact, strict=True))
