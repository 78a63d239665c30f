"""vmap(grad): gradients per sample."""

from __future__ import annotations

from compose.composing import LANES, agree, each
from torch.func import grad, vmap


@each("vmap(grad)")
def test_vmap_grad(case) -> None:
    agree(case, lambda f: vmap(grad(f.loss, f.argnums))(*f.batch(LANES)))
