"""Three derivatives in every order of modes, by torch.func and by plain autograd outside: all the same number."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from compose.composing import close, compiled
from compose.functions import CASES
from torch.func import grad, jvp, vmap

import fusegrad
from fusegrad.runtime.promised import NestedForwardMode

BY_NAME = {c.name: c for c in CASES}
X = torch.tensor(0.7, dtype=torch.float64)


def reverse(f):
    return grad(f)


def forward(f):
    return lambda x: jvp(f, (x,), (torch.ones_like(x),))[1]


def autograd(f):
    def gradient(x):
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(f(leaf), leaf)[0]

    return gradient


MODES = {"grad": reverse, "jvp": forward, "autograd": autograd}
ORDERS = [(o, m, i) for o in MODES for m, i in product(("grad", "jvp"), repeat=2)]
POINTS = [
    pytest.param(n, o, id=f"{n}-{'-'.join(o)}")
    for n in ("SquaredRelu", "NestedBackward", "AllRules", "ForwardOnly")
    for o in ORDERS
]


@pytest.mark.parametrize(("name", "order"), POINTS)
def test_third_derivative(name, order) -> None:
    """SquaredRelu keeps an intermediate, the others an input, rules of their own, no rule at all."""
    case = BY_NAME[name]
    rest = [X.cos()] * (name == "ForwardOnly")
    results = []
    for apply in (compiled(case).apply, case.plain):

        def f(x, apply=apply):
            return apply(x, *rest) * x.exp()

        for mode in reversed(order):
            f = MODES[mode](f)
        results.append(f(X))
    close(*results)


class ByTheSign(BY_NAME["AllRules"].cls):
    """Its jvp looks at numbers: as written under one level of forward mode, refused under two."""

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * torch.cosh(x) if x > 0 else t * torch.cosh(-x)


def test_a_jvp_that_cannot_be_captured_is_refused_where_torch_loses_the_outer_tangent() -> None:
    f = fusegrad.compile(ByTheSign).apply
    with pytest.raises(NestedForwardMode, match=rf"jvp\(ByTheSign\)(.|\n)*{__file__}"):
        forward(forward(f))(X)
    close(forward(reverse(f))(X), X.sinh())
    close(forward(f)(X), X.cosh())


def test_reverse_over_two_batches_of_forward_over_reverse() -> None:
    """A gradient through vmap(vmap(jvp(grad)))): what trains a network on its Laplacian."""
    results = []
    for apply in (compiled(BY_NAME["SquaredRelu"]).apply, BY_NAME["SquaredRelu"].plain):
        x = torch.linspace(-1, 2, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()
        second = vmap(vmap(forward(reverse(lambda x, apply=apply: apply(x) * x.exp()))))
        results.append(torch.autograd.grad(second(x).square().sum(), x)[0])
    close(*results)
