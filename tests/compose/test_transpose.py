"""<jvp(t), g> == <t, backward(g)>: forward mode and reverse mode are transposes, and backward is eager's own."""

from __future__ import annotations

import torch
from compose.composing import Call, close, compiled, directions, each, is_float
from torch.func import jvp, vjp


def inner(a, b):
    return sum((x.conj() * y).real.sum() for x, y in zip(a, b, strict=True))


@each("transpose")
def test_jvp_is_the_transpose_of_backward(case) -> None:
    f = Call(case, compiled(case).apply)
    moving = f.floats()
    outputs, pushed = jvp(f.of_floats(f.outputs), moving, directions(moving))
    cotangents = directions(outputs)
    pulled = vjp(f.of_floats(f.outputs), *moving)[1](cotangents)
    close(inner(pushed, cotangents), inner(directions(moving), pulled))


@each("backward", where=lambda c: "backward" in c.wrote)
def test_vjp_is_the_backward_of_eager(case) -> None:
    f, eager = Call(case, compiled(case).apply), Call(case, case.cls.apply)
    moving = f.floats()
    outputs, pull = vjp(f.of_floats(f.outputs), *moving)
    leaves = [m.clone().requires_grad_() for m in moving]
    wanted = [o for o in eager.of_floats(eager.all)(*leaves) if is_float(o)]
    close(outputs, tuple(o.detach() for o in wanted))
    live = [i for i, o in enumerate(wanted) if o.requires_grad]
    cotangents = directions(outputs)
    theirs = torch.autograd.grad([wanted[i] for i in live], leaves, [cotangents[i] for i in live])
    close(pull(cotangents), theirs)
