"""jvp(vmap): forward mode through a batch."""

from __future__ import annotations

from compose.composing import LANES, agree, directions, each
from torch.func import jvp, vmap


@each("jvp(vmap)")
def test_jvp_vmap(case) -> None:
    def compose(f):
        tensors = f.batch(LANES)
        moving = f.floats(tensors)
        return jvp(f.of_floats(vmap(f.outputs), tensors), moving, directions(moving))

    agree(case, compose)
