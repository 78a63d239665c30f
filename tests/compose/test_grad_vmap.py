"""grad(vmap): one gradient through a batch; an argument that the lanes share gets the sum."""

from __future__ import annotations

from compose.composing import LANES, agree, each
from torch.func import grad, vmap


@each("grad(vmap)")
def test_grad_vmap(case) -> None:
    agree(case, lambda f: grad(lambda *t: vmap(f.loss)(*t).square().sum(), f.argnums)(*f.batch(LANES)))


@each("grad(vmap)")
def test_grad_vmap_of_a_shared_argument(case) -> None:
    def compose(f):
        tensors = [*f.batch(LANES)[:1], *f.point[1:]]
        in_dims = (0, *[None] * (len(tensors) - 1))
        return grad(lambda *t: vmap(f.loss, in_dims)(*t).square().sum(), f.argnums)(*tensors)

    agree(case, compose)
