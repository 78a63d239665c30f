"""What the author wrote always wins over what could be derived: rules that contradict each other show which one ran."""

from __future__ import annotations

import pytest
import torch
from compose.composing import close
from torch.autograd import Function, forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import fusegrad

X = torch.linspace(-1, 2, 4, dtype=torch.float64)
T = X.cos()


class Backward(Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 5 * x


class WithJvp(Backward):
    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * 7 * x


class WithVmap(Backward):
    @staticmethod
    def vmap(info, in_dims, x):
        return WithVmap.apply(x.movedim(in_dims[0], 0)) + 1000 * info.batch_size, 0


class WithBoth(WithJvp):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return WithBoth.apply(x.movedim(in_dims[0], 0)) + 1000 * info.batch_size, 0


def dual(f):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(X, T))).tangent


REVERSE = {
    "grad": lambda f: grad(lambda x: f(x).sum())(X),
    "vjp": lambda f: vjp(f, X)[1](T)[0],
    "jacrev": lambda f: jacrev(f)(X),
    "grad(grad)": lambda f: grad(lambda x: grad(lambda x: f(x).sum())(x).sum())(X),
}
FORWARD = {
    "jvp": lambda f: jvp(f, (X,), (T,)),
    "jacfwd": lambda f: jacfwd(f)(X),
    "jvp(grad)": lambda f: jvp(grad(lambda x: f(x).sum()), (X,), (T,)),
    "grad(jvp)": lambda f: grad(lambda x: jvp(f, (x,), (T,))[1].sum())(X),
    "hessian": lambda f: hessian(lambda x: f(x).sum())(X),
    "linearize": lambda f: linearize(f, X)[1](T),
    "dual numbers": dual,
}
BATCH = {
    "vmap": lambda f: vmap(f)(X),
    "vmap(vmap)": lambda f: vmap(vmap(f))(X.view(2, 2)),
    "vmap(grad)": lambda f: vmap(grad(f))(X),
    "grad(vmap)": lambda f: grad(lambda x: vmap(f)(x).sum())(X),
    "vmap(jacrev)": lambda f: vmap(jacrev(f))(X.view(2, 2)),
    "chunks": lambda f: vmap(f, chunk_size=3)(X),
    "nothing batched": lambda f: vmap(lambda y: f(X) + y)(torch.zeros(3, dtype=X.dtype)),
}
BATCHED_FORWARD = {
    "jvp(vmap)": lambda f: jvp(vmap(f), (X,), (T,)),
    "vmap(jvp)": lambda f: vmap(lambda x, t: jvp(f, (x,), (t,)))(X, T),
}


def all_of(cls, compositions):
    return [pytest.param(cls, c, id=f"{cls.__name__}-{name}") for name, c in compositions.items()]


@pytest.mark.parametrize(
    ("cls", "compose"),
    [
        *all_of(Backward, REVERSE),
        *all_of(WithJvp, REVERSE | FORWARD | BATCH | BATCHED_FORWARD),
        *all_of(WithVmap, REVERSE | BATCH),
        *all_of(WithBoth, REVERSE | FORWARD | BATCH | BATCHED_FORWARD),
    ],
)
def test_as_in_eager(cls, compose) -> None:
    close(compose(fusegrad.compile(cls).apply), compose(cls.apply))


@pytest.mark.parametrize("name", FORWARD | BATCHED_FORWARD)
def test_a_derived_jvp_follows_backward(name) -> None:
    """Eager has no jvp here; it is the transpose of backward, not the derivative of forward."""
    compose = (FORWARD | BATCHED_FORWARD)[name]

    def by_backward(x):
        return (2 * x).detach() + 2.5 * x * x - (2.5 * x * x).detach()

    close(compose(fusegrad.compile(Backward).apply), compose(by_backward))
