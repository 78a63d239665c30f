"""jacrev and jacfwd: every row, every column."""

from __future__ import annotations

from compose.composing import agree, each, real
from torch.func import jacfwd, jacrev


@each("jacrev", where=real)
def test_jacrev(case) -> None:
    agree(case, lambda f: jacrev(f.outputs, f.argnums)(*f.point))


@each("jacfwd", where=real)
def test_jacfwd(case) -> None:
    agree(case, lambda f: jacfwd(f.outputs, f.argnums)(*f.point))
