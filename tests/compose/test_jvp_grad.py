"""jvp(grad): forward over reverse, a Hessian times a vector."""

from __future__ import annotations

from compose.composing import agree, directions, each
from torch.func import grad, jvp


@each("jvp(grad)", order=2)
def test_jvp_grad(case) -> None:
    def compose(f):
        moving = f.floats()
        return jvp(grad(f.of_floats(f.loss), tuple(range(len(moving)))), moving, directions(moving))

    agree(case, compose)
