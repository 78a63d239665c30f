"""Derivatives of gradients: dual numbers over plain backward, what requires grad, draws, what depends on nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from side_by_side import both, leaf, plain, same
from torch import func
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import fusegrad

Tensor = torch.Tensor
Function = torch.autograd.Function


class Doubled(Function):
    """A backward that depends on its gradient alone."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Halved(Function):
    """One gradient depends on what is saved, the other on the incoming one alone."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        return g * 0.5, g * w


def tangent(dual: Tensor) -> Tensor | None:
    return forward_ad.unpack_dual(dual).tangent


def dual(primal: Tensor, seed: int = 3) -> Tensor:
    return forward_ad.make_dual(primal, plain(*primal.shape, seed=seed))


@both
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_17_the_tangent_of_a_gradient(inside, create_graph, backend) -> None:
    def story(cls):
        x = leaf(3)
        before = cls.apply(x)
        with forward_ad.dual_level():
            y = cls.apply(x) if inside else before
            (g,) = torch.autograd.grad(y, x, dual(plain(3)), create_graph=create_graph)
            return g, tangent(g), g.requires_grad

    same(Doubled, story, backend, flags=False)


@both
def test_17_the_tangent_of_a_gradient_after_many_calls(backend) -> None:
    def story(cls):
        x = leaf(3)
        for _ in range(12):
            torch.autograd.grad(cls.apply(x), x, torch.ones(3))
        y = cls.apply(x)
        with forward_ad.dual_level():
            (g,) = torch.autograd.grad(y, x, dual(torch.ones(3)))
            return g, tangent(g)

    same(Doubled, story, backend)


@both
def test_17_mixed_derivatives(backend) -> None:
    def story(cls):
        w = leaf(3)
        with forward_ad.dual_level():
            (g,) = torch.autograd.grad((cls.apply(w) * dual(plain(3))).sum(), w, create_graph=True)
            return g, tangent(g)

    same(Doubled, story, backend, flags=False)


@both
def test_17_a_dual_gradient_beside_saved_tensors_that_require_grad(backend) -> None:
    def story(cls):
        x, w = leaf(3), leaf(3, seed=1)
        with forward_ad.dual_level():
            gx, gw = torch.autograd.grad(cls.apply(x, w), (x, w), dual(plain(3)), create_graph=True)
            flags = gx.requires_grad, gw.requires_grad
            (second,) = torch.autograd.grad((gw + tangent(gw)).sum(), w)
            return gx.detach(), tangent(gx), tangent(gw).detach(), second, flags

    same(Halved, story, backend, flags=False)


# ------------------------------------------------------------------ who requires grad, as backward and its calls ask it
class WhatIsAsked(Function):
    """Computes no more than autograd asks it for."""

    @staticmethod
    def forward(ctx, g, x, y):
        ctx.save_for_backward(x, y)
        needs = ctx.needs_input_grad
        return (g * y if needs[1] else torch.zeros_like(x)), (g * x if needs[2] else torch.zeros_like(y))

    @staticmethod
    def backward(ctx, a, b):
        x, y = ctx.saved_tensors
        return a * y + b * x, None, None


class CallsWhatIsAsked(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        return WhatIsAsked.apply(g, *ctx.saved_tensors)


def product(x: Tensor, y: Tensor) -> Tensor:
    return x * y


COMPOSED = {
    "grad": lambda f, x, y: func.grad(lambda a, b: f(a, b).sum(), (0, 1))(x, y),
    "grad of one": lambda f, x, y: func.grad(lambda a: f(a, y).sum())(x),
    "vjp": lambda f, x, y: func.vjp(f, x, y)[1](x),
    "jvp": lambda f, x, y: func.jvp(f, (x, y), (y, x)),
    "vmap grad": lambda f, x, y: func.vmap(func.grad(lambda a, b: f(a, b).sum(), (0, 1)))(x, y),
    "grad vmap": lambda f, x, y: func.grad(lambda a, b: func.vmap(f)(a, b).sum(), (0, 1))(x, y),
    "jacrev": lambda f, x, y: func.jacrev(f, (0, 1))(x, y),
    "jacfwd": lambda f, x, y: func.jacfwd(f, (0, 1))(x, y),
}


@both
@pytest.mark.parametrize("name", COMPOSED)
def test_14_a_call_in_backward_is_asked_for_what_it_is_in_plain_autograd(name, backend) -> None:
    x, y = plain(2, 3, seed=5).double(), plain(2, 3, seed=6).double()
    fast = fusegrad.compile(CallsWhatIsAsked, backend=backend)
    found, expected = (tree_leaves(COMPOSED[name](f, x, y)) for f in (fast.apply, product))
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right)


class AsksSaved(Function):
    """A saved result requires grad as its argument does."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y, y + 1)
        return y

    @staticmethod
    def backward(ctx, g):
        x, y, between = ctx.saved_tensors
        factors = [2.0 if t.requires_grad else 3.0 for t in (x, y, between)]
        return g * factors[0] + g * factors[1] * 5 + g * factors[2] * 7


@both
def test_17_whether_a_saved_tensor_requires_grad(backend) -> None:
    same(AsksSaved, lambda cls: torch.autograd.grad(cls.apply(x := leaf(3)).sum(), x), backend)


class AsksGradient(Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        return g * (2.0 if g.requires_grad else 3.0)


def test_17_whether_a_gradient_requires_grad_is_asked_of_each() -> None:
    def story(cls):
        x, g = leaf(3), leaf(3, seed=1)
        first = torch.autograd.grad(cls.apply(x).sum(), x)
        return first, *(torch.autograd.grad(cls.apply(x), x, g, create_graph=create) for create in (False, True))

    same(AsksGradient, story, may=["backward"], flags=False)


class AsksItsOwn(Function):
    """Recomputes what was differentiated: what autograd follows there is known, whatever it follows of the gradient."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x.exp() * y, y.floor().sum()

    @staticmethod
    def backward(ctx, g, h):
        with torch.enable_grad():
            x, y = (t.detach().requires_grad_(i == 0) for i, t in enumerate(ctx.saved_tensors))
            outputs = (x.exp() * y, y.floor().sum())
            pairs = [(o, w) for o, w in zip(outputs, (g, h), strict=True) if o.requires_grad]
            (dx,) = torch.autograd.grad([o for o, _ in pairs], [x], [w for _, w in pairs])
        return dx, None


@both
def test_17_whether_autograd_follows_what_backward_recomputed_is_known(backend) -> None:
    def story(cls):
        x, y, g = leaf(3), leaf(3, seed=2), leaf(3, seed=1)
        return [torch.autograd.grad(cls.apply(x, y)[0], x, g, create_graph=create) for create in (False, True)]

    same(AsksItsOwn, story, backend, flags=False)


# ------------------------------------------------------------------ random numbers in backward
class Noisy(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.rand_like(g) * x


class CallsNoisy(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return Scattered.apply(g)


class Scattered(Function):
    @staticmethod
    def forward(ctx, g):
        noise = torch.rand_like(g)
        ctx.save_for_backward(noise)
        return g * noise

    @staticmethod
    def backward(ctx, h):
        return h * ctx.saved_tensors[0]


@both
@pytest.mark.parametrize("cls", [Noisy, CallsNoisy], ids=lambda c: c.__name__)
def test_17_a_double_backward_has_the_numbers_that_backward_drew(cls, backend) -> None:
    def story(cls):
        torch.manual_seed(3)
        x, g = leaf(4), leaf(4, seed=1)
        (first,) = torch.autograd.grad(cls.apply(x), x, g, create_graph=True)
        torch.rand(3)
        second = torch.autograd.grad(first.sin().sum(), (g, x), create_graph=True, allow_unused=True)
        third = torch.autograd.grad(second[0].cos().sum(), (g, x), allow_unused=True)
        return first.detach(), [s if s is None else s.detach() for s in second], third, torch.rand(3)

    same(cls, story, backend, flags=False)


@both
def test_17_so_under_torch_func(backend) -> None:
    fast = fusegrad.compile(Noisy, backend=backend)

    def first(x):
        torch.manual_seed(3)
        return func.grad(lambda t: fast.apply(t).sum())(x)

    x = plain(4).double()
    drawn = first(x) / x
    torch.testing.assert_close(func.grad(lambda t: first(t).sum())(x), drawn)


# ------------------------------------------------------------------ what depends on nothing
class HalvedWhereZero(Function):
    """forward runs as written; the gradient depends on the output by a mask alone."""

    @staticmethod
    def forward(ctx, x):
        y = x.clamp(min=0)
        if y.sum() < 0:
            y = y + 1
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return torch.where(y != 0, g, g * 0.5)


@both
def test_17_over_an_opaque_forward_too_no_path_leads_through_a_mask(backend) -> None:
    def story(cls):
        x, g = leaf(3), leaf(3, seed=1)
        (first,) = torch.autograd.grad(cls.apply(x), x, g, create_graph=True)
        (alone,) = torch.autograd.grad(cls.apply(x), x, g.detach(), create_graph=True)
        return torch.autograd.grad(first.sum(), (x, g), allow_unused=True), alone

    same(HalvedWhereZero, story, backend, may=["forward"], flags=False)


# ------------------------------------------------------------------ backward again and again
class Peak(Function):
    """forward runs as written, and saves nothing: autograd has nothing to free."""

    @staticmethod
    def forward(ctx, x):
        ctx.peak = x.abs().max().item()
        return x / ctx.peak

    @staticmethod
    def backward(ctx, g):
        return g / ctx.peak


class OnCtx(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.y = x.exp()
        return ctx.y * 2

    @staticmethod
    def backward(ctx, g):
        return g * ctx.y


@both
@pytest.mark.parametrize("cls", [Doubled, Peak, OnCtx], ids=lambda c: c.__name__)
def test_12_what_saves_nothing_has_nothing_to_free(cls, backend) -> None:
    def story(cls):
        x, seen = leaf(3), []
        for _ in range(5):
            y = cls.apply(x)
            seen += [torch.autograd.grad(y, x, torch.ones(3)) for _ in range(3)]
        return seen

    same(cls, story, backend, may=["forward"])


# ------------------------------------------------------------------ arguments that are not differentiated
class AssertsNeeds(Function):
    @staticmethod
    def forward(ctx, x, w):
        if ctx.needs_input_grad[1] or w.requires_grad:
            raise RuntimeError("no gradient is implemented for w")
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


NOT_OF_W = {
    "jvp": lambda f, x, w: func.jvp(lambda t: f(t, w), (x,), (x.cos(),)),
    "vmap": lambda f, x, w: func.vmap(f)(x, w),
    "vmap grad": lambda f, x, w: func.vmap(func.grad(lambda t, s: f(t, s).sum()))(x, w),
    "grad": lambda f, x, w: func.grad(lambda t: f(t, w).sum())(x),
    "jvp vmap": lambda f, x, w: func.jvp(lambda t: func.vmap(f)(t, w), (x,), (x.cos(),)),
    "hessian": lambda f, x, w: func.hessian(lambda t: f(t, w).sin().sum())(x),
}


@both
@pytest.mark.parametrize("name", NOT_OF_W)
def test_14_an_argument_needs_a_gradient_where_something_differentiates_it(name, backend) -> None:
    x, w = plain(2, 3, seed=5).double(), plain(2, 3, seed=6).double()
    fast = fusegrad.compile(AssertsNeeds, backend=backend)
    torch.testing.assert_close(NOT_OF_W[name](fast.apply, x, w), NOT_OF_W[name](product, x, w))


def test_14_where_forward_refuses_it_says_why_there_are_no_rules() -> None:
    fast = fusegrad.compile(AssertsNeeds, backend="reference")
    with pytest.raises(RuntimeError, match="setup_context") as raised:
        func.grad(lambda t: fast.apply(t, t).sum())(plain(3))
    assert "no gradient is implemented for w" in raised.value.__notes__[0]
    assert "no gradient is implemented for w" in fast._fusegrad.ledger.records["torch.func"].reason


class PassesOn(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y * 2

    @staticmethod
    def backward(ctx, g):
        return g, g * 2


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_17_a_gradient_that_is_passed_on_is_itself(backend) -> None:
    """Under create_graph, too, where everything else has a node of its own."""
    for cls in (PassesOn, fusegrad.compile(PassesOn, backend=backend)):
        for _ in range(3):
            x, y, g = (torch.ones(3, requires_grad=True) for _ in range(3))
            first, other = torch.autograd.grad(cls.apply(x, y), (x, y), g, create_graph=True)
            assert first is g and other.requires_grad
            (second,) = torch.autograd.grad((first * other).sum(), g)
            assert torch.equal(second, torch.full((3,), 4.0))


class WeighsLabels(Function):
    """Its backward returns something for the labels too, which require no gradient, and of another shape."""

    @staticmethod
    def forward(ctx, x, labels):
        ctx.save_for_backward(x, labels)
        return (x * labels).sum(-1)

    @staticmethod
    def backward(ctx, g):
        x, labels = ctx.saved_tensors
        return g * x * labels.sum(), (g * x).unsqueeze(-1)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_16_a_gradient_that_nobody_needs_has_any_shape(backend) -> None:
    def story(cls: Any) -> Any:
        x, w = leaf(), leaf(seed=1)
        (g,) = torch.autograd.grad(cls.apply(x, torch.tensor([2, 0, 1, 3])), x, w, create_graph=True)
        return g.detach(), torch.autograd.grad(g, [x, w])

    same(WeighsLabels, story, backend)
