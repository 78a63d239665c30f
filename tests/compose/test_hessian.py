"""hessian, jacfwd(jacrev) of one argument after another, vmap(hessian)."""

from __future__ import annotations

from compose.composing import agree, each, real
from torch.func import hessian, jacfwd, jacrev, vmap


@each("hessian", order=2, where=real)
def test_hessian(case) -> None:
    agree(case, lambda f: hessian(f.loss, f.argnums)(*f.point))


@each("vmap(hessian)", order=2, where=real)
def test_vmap_hessian(case) -> None:
    agree(case, lambda f: vmap(hessian(f.loss, f.argnums))(*f.batch(2)))


@each("jacfwd(jacrev)", order=2, where=real)
def test_jacfwd_jacrev_of_every_output(case) -> None:
    agree(case, lambda f: jacfwd(jacrev(f.outputs, f.argnums[0]), f.argnums[-1])(*f.point))
