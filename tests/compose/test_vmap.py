"""vmap, vmap(vmap): the user's forward over a batch."""

from __future__ import annotations

from compose.composing import LANES, agree, each
from torch.func import vmap


@each("vmap")
def test_vmap(case) -> None:
    agree(case, lambda f: vmap(f.all)(*f.batch(LANES)))


@each("vmap(vmap)")
def test_vmap_vmap(case) -> None:
    agree(case, lambda f: vmap(vmap(f.all))(*f.batch(2, LANES)))
