"""`no_grad` and its like within a backward: they cut what is recorded, and leave tangents as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from side_by_side import both, leaf, plain, same
from torch import func
from torch.autograd import forward_ad

import fusegrad
from fusegrad.runtime.kernels import interpreter as interpret

Tensor = torch.Tensor
Function = torch.autograd.Function
Body = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def class_of(body: Body) -> type:
    """x * w, with any backward."""

    class Product(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, w):
            return x * w

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return body(g, *ctx.saved_tensors)

        @staticmethod
        def jvp(ctx, x_t, w_t):
            x, w = ctx.saved_tensors
            return x_t * w + w_t * x

    return Product


@torch.no_grad()
def doubled(t: Tensor) -> Tensor:
    return t * 2


@torch.no_grad()
def multiples(t: Tensor):
    yield t
    yield t * 2


def in_part(g, x, w):
    with torch.no_grad():
        factor = (x * 3).sin()
    return g * w * factor, g * x


def in_whole(g, x, w):
    with torch.no_grad():
        return g * w, g * x


def switched(g, x, w):
    with torch.set_grad_enabled(False):
        factor = x.exp()
    return g * factor, g * w


def nested(g, x, w):
    with torch.no_grad():
        a = x.exp()
        with torch.enable_grad():
            b = x.sin() * a
        c = b * 2
    return g * b, g * c


def decorated(g, x, w):
    return g * doubled(w), doubled(g) * x


def generated(g, x, w):
    first, second = multiples(x)
    return g * first, g * second * w


def left_by_an_error(g, x, w):
    try:
        with torch.no_grad():
            a = x.exp()
            raise ValueError
    except ValueError:
        pass
    return g * x.exp() * a, g * w


def written_to(g, x, w):
    a = x * 2
    with torch.no_grad():
        a.mul_(w)
    return g * a, g * w


def made_and_filled(g, x, w):
    with torch.no_grad():
        a = torch.empty_like(x)
    a[:] = x * w
    return g * a, g * x


def view_made(g, x, w):
    a = x * w
    with torch.no_grad():
        v = a.t()
    return g * v.t(), g * x


BODIES = (
    in_part, in_whole, switched, nested, decorated, generated, left_by_an_error, written_to, made_and_filled, view_made,
)  # fmt: skip
bodies = pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__)


def flags_and_seconds(cls, gradient_moves: bool = True):
    """What requires grad of gradients, and of gradients of gradients, and all numbers."""
    x, w = leaf(3, 3), leaf(3, 3, seed=1)
    g = leaf(3, 3, seed=2) if gradient_moves else plain(3, 3, seed=2)
    first = torch.autograd.grad(cls.apply(x, w), (x, w), g, create_graph=True)
    told: list = [(f.detach(), f.requires_grad) for f in first]
    for f in first:
        if f.requires_grad:
            asked = (x, w, g) if gradient_moves else (x, w)
            second = torch.autograd.grad(f.sin().sum(), asked, create_graph=True, allow_unused=True)
            told += [None if s is None else (s.detach(), s.requires_grad) for s in second]
    return told


@both
@pytest.mark.parametrize("moves", [True, False])
@bodies
def test_17_no_grad_within_a_backward(body, moves, backend) -> None:
    same(class_of(body), lambda cls: flags_and_seconds(cls, moves), backend, flags=False)


@both
@bodies
def test_17_tangents_go_through_no_grad(body, backend) -> None:
    """Forward mode does not heed the grad mode, in eager."""

    def story(cls):
        x, w = leaf(3, 3), leaf(3, 3, seed=1)
        y = cls.apply(x, w)
        with forward_ad.dual_level():
            g = forward_ad.make_dual(plain(3, 3, seed=2), plain(3, 3, seed=3))
            found = torch.autograd.grad(y, (x, w), g, create_graph=True)
            pairs = [forward_ad.unpack_dual(f) for f in found]
            return [(p.primal.detach(), p.primal.requires_grad, p.tangent.detach()) for p in pairs]

    same(class_of(body), story, backend, flags=False, tolerance=1e-6)


def transformed(cls):
    x, w, t = plain(3, 3), plain(3, 3, seed=1), plain(3, 3, seed=2)
    slope = func.grad(lambda x, w: cls.apply(x, w).sin().sum(), (0, 1))
    return (
        func.jvp(slope, (x, w), (t, t)), func.jacrev(slope)(x, w), func.jacfwd(slope, 1)(x, w),
        func.vmap(slope)(x, w), func.vmap(func.jacrev(slope))(x, w),
        func.grad(lambda x: func.jvp(slope, (x, w), (t, t))[1][0].sum())(x),
    )  # fmt: skip


@both
@bodies
def test_17_no_grad_under_transforms(body, backend) -> None:
    same(class_of(body), transformed, backend, flags=False, tolerance=1e-5)


def gradient_of_its_own(g, x, w):
    with torch.enable_grad():
        t = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(t.sin(), t, g)
    return slope * w, g * x


@both
def test_17_tangents_go_through_a_gradient_of_its_own(backend) -> None:
    def story(cls):
        x, w = leaf(3, 3), leaf(3, 3, seed=1)
        y = cls.apply(x, w)
        with forward_ad.dual_level():
            g = forward_ad.make_dual(plain(3, 3, seed=2), plain(3, 3, seed=3))
            found = torch.autograd.grad(y, (x, w), g, create_graph=True)
            return [[t.detach() for t in forward_ad.unpack_dual(f)] for f in found]

    same(class_of(gradient_of_its_own), story, backend, flags=False, tolerance=1e-6)


def inference_within(g, x, w):
    with torch.inference_mode():
        a = x.exp()
    return g * a.clone(), g * w


def view_written_to_late(g, x, w):
    a = x * w
    with torch.no_grad():
        v = a.view(9)
    v.mul_(2)
    return g * a, g * w


@pytest.mark.parametrize("body", [inference_within, view_written_to_late])
def test_17_what_eager_refuses_to_record_is_refused(body) -> None:
    """Inference mode, and writes to a view of `no_grad`, in a backward: those lines are the user's own."""
    same(class_of(body), flags_and_seconds, may=("torch.func", "backward"), flags=False)


def test_17_no_grad_costs_no_launch(monkeypatch) -> None:
    """An ordinary backward is the same kernels with and without."""

    def plainly(g, x, w):
        return g * w * (x * 3).sin(), g * x

    launch = interpret.run

    def launches(body: Body) -> int:
        fast = fusegrad.compile(class_of(body), backend="interpret")
        x, w = leaf(3, 3), leaf(3, 3, seed=1)
        fast.apply(x, w).sum().backward()
        loss, counted = fast.apply(x, w).sum(), []
        with monkeypatch.context() as patch:
            patch.setattr(interpret, "run", lambda *given: (counted.append(1), launch(*given)))
            loss.backward()
        return len(counted)

    assert launches(in_part) == launches(plainly) > 0


# ------------------------------------------------------------------ questions about history
class JoinsTheHistory(Function):
    """A constant is made with the flag of what it is put beside: with either answer it is the same graph."""

    @staticmethod
    def forward(ctx, x, w):
        assert x.shape[-1] == 4
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        v = w[..., :2] * 3
        assert v.shape[-1] == 2
        zero = torch.zeros(v.shape[:-1], requires_grad=v.requires_grad)
        skew = torch.stack([torch.stack([zero, -v[..., 1]], -1), torch.stack([v[..., 0], zero], -1)], -2)
        h = g[..., :2] * 2
        more = torch.zeros_like(h, requires_grad=h.requires_grad)
        return torch.cat([(h.unsqueeze(-2) @ skew).squeeze(-2) + more, g[..., 2:]], -1), g * x


class ShowsTheAnswer(JoinsTheHistory):
    """What it returns has a history for the sake of the answer alone."""

    @staticmethod
    def backward(ctx, g):
        h = g * 2
        return torch.zeros_like(h, requires_grad=h.requires_grad), h.detach()


class AnswersDiffer(JoinsTheHistory):
    @staticmethod
    def backward(ctx, g):
        h = g * 2
        return (h * 3 if h.requires_grad else h.sin()), torch.full_like(h, 2.0 if h.requires_grad else 5.0)


def twice(cls):
    """First and second order, with gradients that are followed and that are not."""
    found = []
    for follows in (False, True):
        x, w = leaf(3, 4), leaf(3, 4)
        out = cls.apply(x, w)
        found += list(torch.autograd.grad(out, (x, w), torch.ones_like(out), retain_graph=True))
        g = torch.full_like(out, 2.0).requires_grad_(follows)
        first = torch.autograd.grad(out, (x, w), g, create_graph=True)
        found += [*(t.detach() for t in first), [t.requires_grad for t in first]]
        total = sum(t.sin().sum() for t in first)
        wanted = (x, w, g) if follows else (x, w)
        if total.requires_grad:
            found += list(torch.autograd.grad(total, wanted, allow_unused=True))
    return found


@both
def test_constants_that_join_the_history_of_a_gradient(backend):
    same(JoinsTheHistory, twice, backend)


@pytest.mark.parametrize("cls", [ShowsTheAnswer, AnswersDiffer])
def test_answers_about_history_that_show(cls):
    same(cls, twice, opaque=("backward",), may=("torch.func",))
