"""jvp, vmap(jvp): a tangent per sample."""

from __future__ import annotations

from compose.composing import LANES, agree, directions, each
from torch.func import jvp, vmap


def pushed(f, *tensors):
    moving = f.floats(tensors)
    return jvp(f.of_floats(f.outputs, tensors), moving, directions(moving))


@each("jvp")
def test_jvp(case) -> None:
    agree(case, lambda f: pushed(f, *f.point))


@each("vmap(jvp)")
def test_vmap_jvp(case) -> None:
    agree(case, lambda f: vmap(lambda *t: pushed(f, *t))(*f.batch(LANES)))
