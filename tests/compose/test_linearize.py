"""linearize: the tangent map alone, to be called often."""

from __future__ import annotations

import torch
from compose.composing import agree, directions, each
from torch.func import linearize, vmap


@each("linearize")
def test_linearize(case) -> None:
    def compose(f):
        moving = f.floats()
        outputs, push = linearize(f.of_floats(f.outputs), *moving)
        ways = directions(moving)
        twice = [torch.stack([w, 2 * w]) for w in ways]
        return outputs, push(*ways), push(*(2 * w for w in ways)), vmap(push)(*twice)

    agree(case, compose)
