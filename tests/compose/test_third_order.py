"""Three derivatives in every order of modes, by torch.func and by plain autograd outside: all the same number."""

from __future__ import annotations

from itertools import product

import numpy
import pytest
import torch
from compose.composing import close, compiled
from compose.functions import CASES
from torch.func import grad, jvp, vmap

import fusegrad
from fusegrad.runtime.functorch.rules.user_jvp import NestedForwardMode

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
    """Its jvp looks at numbers: no capture."""

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * torch.cosh(x) if x > 0 else t * torch.cosh(-x)


def test_a_jvp_that_cannot_be_captured_is_right_where_torch_loses_the_outer_tangent() -> None:
    f = fusegrad.compile(ByTheSign).apply
    for _ in range(2):
        close(forward(forward(f))(X), X.sinh())
        close(forward(forward(forward(f)))(X), X.cosh())
        close(reverse(forward(forward(f)))(X), X.cosh())
        close(forward(reverse(forward(f)))(X), X.cosh())
        close(forward(forward(reverse(f)))(X), X.cosh())
    close(forward(reverse(f))(X), X.sinh())
    close(forward(f)(X), X.cosh())


class InNumpy(BY_NAME["AllRules"].cls):
    """Its jvp calls a Function that leaves torch."""

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * NumpyCosh.apply(x)


class NumpyCosh(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return torch.from_numpy(numpy.asarray(numpy.cosh(x.numpy())))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].sinh()

    @staticmethod
    def jvp(ctx, t):
        return t * ctx.saved_tensors[0].sinh()


def test_a_jvp_that_calls_what_leaves_torch_is_right_under_two_levels_and_refused_under_more() -> None:
    f = fusegrad.compile(InNumpy).apply
    close(forward(forward(f))(X), X.sinh())
    with pytest.raises(NestedForwardMode, match=r"jvp\(InNumpy\)(.|\n)*NumpyCosh"):
        forward(forward(forward(f)))(X)
    close(forward(forward(f))(X), X.sinh())


def test_reverse_over_two_batches_of_forward_over_reverse() -> None:
    """A gradient through vmap(vmap(jvp(grad)))): what trains a network on its Laplacian."""
    results = []
    for apply in (compiled(BY_NAME["SquaredRelu"]).apply, BY_NAME["SquaredRelu"].plain):
        x = torch.linspace(-1, 2, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()
        second = vmap(vmap(forward(reverse(lambda x, apply=apply: apply(x) * x.exp()))))
        results.append(torch.autograd.grad(second(x).square().sum(), x)[0])
    close(*results)
