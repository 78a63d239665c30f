"""Backwards that compute forward again and differentiate it: with autograd.grad, or with .backward() and .grad."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from side_by_side import both, leaf, same
from torch.autograd import Function, Variable

Tensor = torch.Tensor


def body(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sin() + x.square()


class Kept(Function):
    """What all of these share: forward without a history, its arguments saved."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return body(x, w)


class ByGrad(Kept):
    @staticmethod
    def backward(ctx, g):
        x, w = (t.detach() for t in ctx.saved_tensors)
        x.requires_grad = True
        w.requires_grad = True
        with torch.enable_grad():
            y = body(x, w)
        return torch.autograd.grad(y, (x, w), g)


class ByBackward(Kept):
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        x, w = x.detach(), w.detach().requires_grad_()
        x.requires_grad = True
        with torch.enable_grad():
            y = body(x, w)
            y.backward(gradient=g)
        return x.grad, w.grad * 2


class Twice(Kept):
    """The second .backward() adds to what is there."""

    @staticmethod
    def backward(ctx, g):
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = body(x, w)
            y.backward(g, retain_graph=True)
            (y * 2).sum().backward()
        assert x.grad is not None
        return x.grad, w.grad


class InPlaceFlag(Kept):
    """`detach_` and `requires_grad_` on what is made within."""

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            a = (x * 1).detach_().requires_grad_()
            y = body(a, w.detach()) * 3
            (found,) = torch.autograd.grad(y.sum(), a)
        return found * g, None


class ByVariable(Kept):
    """`Variable(t)` is the old name of `t.detach()`."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(Variable(x), Variable(w, requires_grad=False))
        return body(Variable(x), torch.autograd.Variable(data=w))

    @staticmethod
    def backward(ctx, g):
        x, w = (Variable(t, requires_grad=True) for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = body(x, w)
        assert isinstance(y, Variable) and isinstance(Variable(g), torch.Tensor)
        return torch.autograd.grad(y, (x, w), Variable(g))


class ThroughVariable(Kept):
    """What is made a Variable leads nowhere in a second derivative; the rest does."""

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        mask = Variable(torch.zeros_like(x))
        mask[x > 0] = 1
        return g * mask * w + Variable(g * x), torch.autograd.Variable(torch.ones_like(w)) * g


CLASSES = [ByVariable, ThroughVariable, ByGrad, ByBackward, Twice, InPlaceFlag]


def story(cls: Any) -> Any:
    x, w = leaf(3, 4), leaf(3, 4, seed=1)
    y = cls.apply(x, w)
    first = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True, allow_unused=True)
    second = torch.autograd.grad(sum(f.sum() for f in first if f is not None), (x, w), allow_unused=True)
    z = cls.apply(x, w)
    z.sum().backward()
    return y, first, second, x.grad, w.grad


@both
@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_values_gradients_and_second_order(cls, backend):
    fast = same(cls, story, backend, flags=False)  # of a gradient with a history the node has another name
    assert not fast._fusegrad.ledger.opaque_calls


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_more_calls(cls):
    def plain(fast: Any) -> Any:
        found = []
        for n in range(3):
            x, w = leaf(2 + n, 4), leaf(2 + n, 4, seed=n)
            fast.apply(x, w).sum().backward()
            found.append((x.grad, w.grad, x.requires_grad))
        return found

    same(cls, plain)


class IntoSaved(Kept):
    """The gradient goes to the very tensors that the caller has."""

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            body(x, w).backward(g)
        return x.grad * 2, None


def test_gradients_of_the_callers_own_tensors_are_as_written():
    def caller(cls: Any) -> Any:
        x, w = leaf(3), leaf(3, seed=1)
        (g,) = torch.autograd.grad(cls.apply(x, w).sum(), x)
        return g, x.grad, w.grad

    same(IntoSaved, caller, may=("backward",))


WEIGHT = torch.ones(3).requires_grad_()


class IntoParameter(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * WEIGHT.detach()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = x * WEIGHT
        y.backward(g)
        return x.grad


def test_gradients_of_parameters_happen_at_every_call():
    def caller(cls: Any) -> Any:
        WEIGHT.grad = None
        found = []
        for n in range(3):
            x = leaf(3, seed=n)
            (g,) = torch.autograd.grad(cls.apply(x).sum(), x)
            found.append((g, WEIGHT.grad.clone()))
        return found

    same(IntoParameter, caller, may=("backward",))
    assert type(WEIGHT.grad) is Tensor


class AsksForGrad(Function):
    """The `.grad` that the caller's argument has at the time."""

    @staticmethod
    def forward(ctx, x):
        return x * 2 if x.grad is None else x + x.grad

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_the_grad_of_an_argument_is_read_at_every_call():
    def caller(cls: Any) -> Any:
        x = leaf(3)
        found = []
        for _ in range(3):
            y = cls.apply(x)
            y.sum().backward()
            found.append(y)
        return found, x.grad

    same(AsksForGrad, caller, may=("forward",))
