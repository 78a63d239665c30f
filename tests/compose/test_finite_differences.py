"""Derivatives against central differences in float64, where the class's rules are the derivatives of its forward."""

from __future__ import annotations

import torch
from compose.composing import Call, compiled, directions, each
from torch.func import grad, jvp

STEP = 1e-5


def differences(f, at, along):
    ahead, behind = (f(*(a + s * STEP * d for a, d in zip(at, along, strict=True))) for s in (1, -1))
    return [(p - m) / (2 * STEP) for p, m in zip(ahead, behind, strict=True)]


@each("slope", where=lambda c: c.true)
def test_jvp(case) -> None:
    f = Call(case, compiled(case).apply)
    at = f.floats()
    pushed = jvp(f.of_floats(f.outputs), at, directions(at))[1]
    eager = Call(case, case.cls.apply)
    expected = differences(eager.of_floats(eager.outputs), at, directions(at))
    torch.testing.assert_close(list(pushed), expected, rtol=1e-6, atol=1e-7)


@each("grad", where=lambda c: c.true)
def test_grad(case) -> None:
    f = Call(case, compiled(case).apply)
    at, eager = f.floats(), Call(case, case.cls.apply)
    pulled = grad(f.of_floats(f.loss), tuple(range(len(at))))(*at)
    slope = sum((p.conj() * d).real.sum() for p, d in zip(pulled, directions(at), strict=True))
    (expected,) = differences(lambda *x: (eager.of_floats(eager.loss)(*x).detach(),), at, directions(at))
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=1e-7)
