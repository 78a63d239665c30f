"""in_dims and out_dims anywhere: negative, mixed, None, pytrees; batches in chunks."""

from __future__ import annotations

import pytest
from compose.composing import Call, agree, close, compiled
from compose.functions import CASES
from torch.func import grad, jacrev, vmap

BY_NAME = {c.name: c for c in CASES}
NAMES = ("Snake", "LayerNorm", "Attention", "GatherColumns", "Phase", "Moments", "ForwardOnlyTwoOutputs", "AllRules")
some = pytest.mark.parametrize("case", [BY_NAME[n] for n in NAMES], ids=lambda c: c.name)

IN_DIMS = {
    "front": lambda i, n: 0,
    "back": lambda i, n: -1,
    "mixed": lambda i, n: (0, -1, 1)[i % 3],
    "first": lambda i, n: 0 if i == 0 else None,
    "last": lambda i, n: -1 if i == n - 1 else None,
}


def placed(f, where, lanes=3):
    """Tensors with the batch axis where the name says, and the in_dims."""
    dims = tuple(IN_DIMS[where](i, len(f.point)) for i in range(len(f.point)))
    whole = zip(f.batch(lanes), f.point, dims, strict=True)
    return [one if d is None else many.movedim(0, d) for many, one, d in whole], dims


@some
@pytest.mark.parametrize("where", IN_DIMS)
def test_in_dims(case, where) -> None:
    def compose(f):
        tensors, dims = placed(f, where)
        per_lane = vmap(grad(f.loss, f.argnums), dims)(*tensors)
        total = grad(lambda *t: vmap(f.loss, dims)(*t).square().sum(), f.argnums)(*tensors)
        return vmap(f.all, dims)(*tensors), per_lane, total

    agree(case, compose)


@some
@pytest.mark.parametrize("out", [1, -1])
def test_out_dims(case, out) -> None:
    agree(case, lambda f: vmap(f.all, out_dims=out)(*f.batch(3)))


@some
def test_pytrees(case) -> None:
    def compose(f):
        tensors, dims = placed(f, "mixed")
        arguments, where = {"tensors": tensors}, {"tensors": list(dims)}
        return vmap(lambda d: {"outputs": list(f.all(*d["tensors"]))}, (where,), {"outputs": -1})(arguments)

    agree(case, compose)


@some
@pytest.mark.parametrize("size", [1, 2, 7])
def test_chunks(case, size) -> None:
    agree(case, lambda f: vmap(grad(f.loss, f.argnums), chunk_size=size)(*f.batch(5)))


@pytest.mark.parametrize("size", [1, 3])
def test_a_jacobian_in_chunks(size) -> None:
    case = BY_NAME["Softmax"]
    f = Call(case, compiled(case).apply)
    close(jacrev(f.outputs, chunk_size=size)(*f.point)[0], jacrev(case.plain)(*f.point))
