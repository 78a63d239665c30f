"""torch.autograd.forward_ad: dual numbers without torch.func."""

from __future__ import annotations

import torch
from compose.composing import agree, directions, each
from torch.autograd import forward_ad


@each("dual numbers")
def test_dual_numbers(case) -> None:
    def compose(f):
        moving = f.floats()
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(m, d) for m, d in zip(moving, directions(moving), strict=True)]
            pairs = [forward_ad.unpack_dual(o) for o in f.of_floats(f.outputs)(*duals)]
        return [(p.primal, torch.zeros_like(p.primal) if p.tangent is None else p.tangent) for p in pairs]

    agree(case, compose)
