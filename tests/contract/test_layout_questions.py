"""Who asks how a tensor lies in memory: only a backward that may is left to eager for gradients with gaps."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch.autograd import Function

import fusegrad


def by_layout(g):
    return g * 2 if g.is_contiguous() else g * 3


class Rule:
    def of(self, g):
        return by_layout(g)


class OfItsOwn(Function):
    """forward asks for the strides of what it has made."""

    @staticmethod
    def forward(ctx, x):
        y = (x * 2).contiguous()
        ctx.save_for_backward(x)
        return y.as_strided((y.shape[0], y.shape[1] - 1), y.stride()) * x[:, 1:]

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        zero = torch.zeros_like(x[:, :1])
        return torch.cat([g * x[:, 1:] * 2, zero], 1) + torch.cat([zero, g * x[:, :-1] * 2], 1)


def of_ctx(what):
    class OfCtx(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.rule = what
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return ctx.rule(g) if callable(ctx.rule) else ctx.rule.of(g)

    return OfCtx


def with_gaps(function, x):
    y = function.apply(x)
    g = torch.linspace(1, 2, 2 * y.numel()).view(*y.shape[:-1], -1)[..., ::2]
    return torch.autograd.grad(y, x, g)[0]


def test_a_forward_that_asks_for_its_own_leaves_backward_compiled() -> None:
    fast, x = fusegrad.compile(OfItsOwn, backend="interpret"), torch.randn(3, 9, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(with_gaps(fast, x), with_gaps(OfItsOwn, x))


@pytest.mark.parametrize(
    "what", [by_layout, lambda g: by_layout(g + 0), Rule(), Rule().of, functools.partial(by_layout)],
    ids=["function", "lambda", "object", "method", "partial"],
)  # fmt: skip
def test_code_on_ctx_may_ask(what) -> None:
    function, x = of_ctx(what), torch.randn(3, 9, requires_grad=True)
    fast = fusegrad.compile(function, backend="interpret")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(with_gaps(fast, x), with_gaps(function, x))
