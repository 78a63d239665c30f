"""The jvp that is derived of a backward, on kernels: its captured graph transposed, without another capture."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function
from torch.func import grad, hessian, jacfwd, jvp, vmap

import fusegrad
from fusegrad.runtime.settings.counters import stats


class Detached(Function):
    """A backward that cuts double differentiation, and is another map than the derivative of forward."""

    @staticmethod
    def forward(ctx, x, w, k):
        ctx.save_for_backward(x, w)
        ctx.k = k
        return x * w.sum(0), (x > 0).long(), x.sum(-1)

    @staticmethod
    def backward(ctx, g, _, h):
        x, w = ctx.saved_tensors
        with torch.no_grad():
            scaled = g.detach() * ctx.k
        gx = scaled * w.sum(0) + h.unsqueeze(-1)
        return torch.where(x > 0, gx, 0), (g * x).sum(0, keepdim=True).expand(w.shape), None


class Partial(Function):
    """No gradient for an argument that is a float."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return (x * y).cumsum(0)

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g.flip(0).cumsum(0).flip(0) * y, None


def numbers(*shape, dtype=torch.float64):
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=dtype).cos().reshape(shape)


def detached(x, w, dx, dw):
    moved = torch.where(x > 0, dx, 0)
    return moved * 2 * w.sum(0) + x * dw.sum(0), moved.sum(-1)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


X, W, DX, DW = numbers(5, 4), numbers(3, 4), numbers(5, 4).sin(), numbers(3, 4).exp()


def test_it_is_the_transpose_and_nothing_more_is_captured() -> None:
    fast = fusegrad.compile(Detached, backend="interpret").apply
    before = stats()["captures"]
    a, _, b = jvp(lambda x, w: fast(x, w, 2.0), (X, W), (DX, DW))[1]
    assert stats()["captures"] - before == 2  # forward and backward
    close((a, b), detached(X, W, DX, DW))


@pytest.mark.parametrize("moving", ["x", "w"])
def test_one_argument_moves(moving) -> None:
    fast = fusegrad.compile(Detached, backend="interpret").apply
    run, given = {"x": (lambda x: fast(x, W, 2.0), (X, DX)), "w": (lambda w: fast(X, w, 2.0), (W, DW))}[moving]
    a, _, b = jvp(run, given[:1], given[1:])[1]
    zero = torch.zeros_like
    close((a, b), detached(X, W, DX if moving == "x" else zero(DX), DW if moving == "w" else zero(DW)))


def test_tangents_of_any_layout_in_a_batch() -> None:
    fast = fusegrad.compile(Detached, backend="interpret").apply
    push = lambda dx, dw: jvp(lambda x, w: fast(x, w, 2.0), (X, W), (dx, dw))[1]  # noqa: E731
    a, _, b = push(DX.t().contiguous().t(), DW)
    close((a, b), detached(X, W, DX, DW))
    many = torch.stack([DX, DX * 2, DX - 1])
    for dx, dim in ((many, 0), (many.movedim(0, 2).contiguous(), 2), (many.movedim(0, 1), 1)):
        a, _, b = vmap(push, (dim, None))(dx, DW)
        close((a, b), tuple(torch.stack(r) for r in zip(*(detached(X, W, d, DW) for d in many), strict=True)))


@pytest.mark.parametrize("backend", ["interpret", "reference"])
def test_an_argument_without_a_gradient_contributes_nothing(backend) -> None:
    fast = fusegrad.compile(Partial, backend=backend).apply
    close(jvp(fast, (X, X + 1), (DX, DX))[1], (DX * (X + 1)).cumsum(0))
    close(jacfwd(fast, 1)(X[:, :1], X[:, 1:2]), torch.zeros(5, 1, 5, 1, dtype=X.dtype))


def test_sizes_are_symbols() -> None:
    fast = fusegrad.compile(Partial, backend="interpret").apply
    jvp(fast, (X, X + 1), (DX, DX))
    before = stats()["captures"]
    x = numbers(7, 3)
    close(jvp(fast, (x, x + 1), (x, x))[1], (x * (x + 1)).cumsum(0))
    assert stats()["captures"] == before


class Kept(Function):
    """Second order goes through what forward kept."""

    @staticmethod
    def forward(ctx, x, w):
        y = torch.tanh(x @ w)
        ctx.save_for_backward(x, w, y)
        return y.exp()

    @staticmethod
    def backward(ctx, g):
        x, w, y = ctx.saved_tensors
        inner = g * y.exp() * (1 - y * y)
        return inner @ w.mT, x.mT @ inner


def test_derivatives_of_derivatives_by_transposition() -> None:
    fast, plain = fusegrad.compile(Kept, backend="interpret").apply, lambda x, w: torch.tanh(x @ w).exp()
    w = numbers(4, 3)
    for compose in (
        lambda f: hessian(lambda x: f(x, w).sum())(X),
        lambda f: vmap(hessian(lambda x: f(x, w).sum()))(torch.stack([X, X + 1])),
        lambda f: jvp(grad(lambda x, w: f(x, w).sin().sum(), (0, 1)), (X, w), (DX, w.cos()))[1],
        lambda f: grad(lambda x: jvp(lambda x: f(x, w), (x,), (DX,))[1].sum())(X),
    ):
        close(compose(fast), compose(plain))


def test_the_derivative_of_forward_is_its_transposed_vjp() -> None:
    fast = fusegrad.compile(Kept, backend="interpret", derive_jvp="forward").apply
    plain, w = lambda x, w: torch.tanh(x @ w).exp(), numbers(4, 3)
    close(jvp(fast, (X, w), (DX, w.cos()))[1], jvp(plain, (X, w), (DX, w.cos()))[1])
    close(jacfwd(fast)(X, w), jacfwd(plain)(X, w))
