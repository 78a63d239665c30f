"""grad(grad(grad)): reverse mode, three deep."""

from __future__ import annotations

from compose.composing import agree, directions, each
from torch.func import grad


def along(f, argnums):
    """The derivative of a number along fixed directions, by reverse mode."""
    pulled = grad(f, argnums)

    def step(*tensors):
        found = pulled(*tensors)
        ways = directions(tuple(t.detach() for t in tensors if t.is_floating_point() or t.is_complex()))
        return sum((g * w).real.sum() if g.is_complex() else (g * w).sum() for g, w in zip(found, ways, strict=True))

    return step


@each("grad(grad(grad))", order=3)
def test_grad_grad_grad(case) -> None:
    agree(case, lambda f: grad(along(along(f.loss, f.argnums), f.argnums), f.argnums)(*f.point))
