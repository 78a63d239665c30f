"""A batch gives what eager gives lane by lane, stacked: values, and gradients from plain autograd."""

from __future__ import annotations

import torch
from compose.composing import LANES, Call, close, compiled, each
from torch.func import grad, vmap


def lanes(tensors):
    return [tuple(t[i] for t in tensors) for i in range(LANES)]


def stacked(rows):
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


@each("vmap")
def test_values(case) -> None:
    f, eager = Call(case, compiled(case).apply), Call(case, case.cls.apply)
    close(vmap(f.all)(*f.batch(LANES)), stacked(eager.all(*lane) for lane in lanes(f.batch(LANES))))


def eager_gradients(f, lane):
    leaves = [m.clone().requires_grad_() for m in f.floats(lane)]
    return torch.autograd.grad(f.of_floats(f.loss, lane)(*leaves), leaves)


@each("vmap(grad)", where=lambda c: "backward" in c.wrote)
def test_gradients(case) -> None:
    f, eager = Call(case, compiled(case).apply), Call(case, case.cls.apply)
    mine = vmap(grad(f.loss, f.argnums))(*f.batch(LANES))
    close(mine, stacked(eager_gradients(eager, lane) for lane in lanes(f.batch(LANES))))
