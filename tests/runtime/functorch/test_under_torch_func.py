"""torch.func over compiled classes: compared with eager where eager can, with mathematics elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from function_samples import (
    BACKENDS,
    CrossEntropy,
    Cube,
    LayerNorm,
    Linear,
    Partial,
    RMSNorm,
    Softmax,
    SwiGLU,
    Wrong,
    as_tuple,
    assert_same,
    leaf,
    raised,
)
from torch.autograd import Function
from torch.autograd import forward_ad as fwd
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fusegrad

Tensor = torch.Tensor
both = pytest.mark.parametrize("backend", BACKENDS)


def cube(backend: str) -> Any:
    fast = fusegrad.compile(Cube, backend=backend)
    return lambda x: fast.apply(x)[0]


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


X = torch.linspace(-1, 2, 5)
ORDERS = {
    "grad": (lambda f: grad(lambda x: f(x).sum())(X), 3 * X**2),
    "grad grad": (lambda f: grad(lambda x: grad(lambda x: f(x).sum())(x).sum())(X), 6 * X),
    "vmap": (lambda f: vmap(f)(X), X**3),
    "vmap grad": (lambda f: vmap(grad(f))(X), 3 * X**2),
    "vmap grad grad": (lambda f: vmap(grad(grad(f)))(X), 6 * X),
    "vmap grad grad grad": (lambda f: vmap(grad(grad(grad(f))))(X), torch.full((5,), 6.0)),
    "grad vmap": (lambda f: grad(lambda x: vmap(f)(x).sum())(X), 3 * X**2),
    "vmap vmap": (lambda f: vmap(vmap(f))(X.view(1, 5)), X.view(1, 5) ** 3),
    "vmap vmap grad": (lambda f: vmap(vmap(grad(f)))(X.view(1, 5)), 3 * X.view(1, 5) ** 2),
    "vmap grad vmap": (lambda f: vmap(grad(lambda r: vmap(f)(r).sum()))(X.view(1, 5)), 3 * X.view(1, 5) ** 2),
    "jvp": (lambda f: jvp(f, (X,), (2 * X,))[1], 6 * X**3),
    "jvp grad": (lambda f: jvp(grad(lambda x: f(x).sum()), (X,), (torch.ones(5),))[1], 6 * X),
    "grad jvp": (lambda f: grad(lambda x: jvp(f, (x,), (torch.ones(5),))[1].sum())(X), 6 * X),
    "jvp jvp": (lambda f: jvp(lambda x: jvp(f, (x,), (torch.ones(5),))[1], (X,), (torch.ones(5),))[1], 6 * X),
    "vjp": (lambda f: vjp(f, X)[1](2 * X)[0], 6 * X**3),
    "vmap jvp": (lambda f: vmap(lambda x, t: jvp(f, (x,), (t,))[1])(X, 2 * X), 6 * X**3),
    "jacrev": (lambda f: jacrev(f)(X), torch.diag(3 * X**2)),
    "jacfwd": (lambda f: jacfwd(f)(X), torch.diag(3 * X**2)),
    "hessian": (lambda f: hessian(lambda x: f(x).sum())(X), torch.diag(6 * X)),
    "jacrev jacrev": (lambda f: jacrev(jacrev(lambda x: f(x).sum()))(X), torch.diag(6 * X)),
    "jacrev jacfwd": (lambda f: jacrev(jacfwd(lambda x: f(x).sum()))(X), torch.diag(6 * X)),
    "jacfwd jacfwd": (lambda f: jacfwd(jacfwd(lambda x: f(x).sum()))(X), torch.diag(6 * X)),
    "vmap hessian": (lambda f: vmap(hessian(f))(X), 6 * X),
    "vmap jacrev": (lambda f: vmap(jacrev(f))(X.view(5, 1)), (3 * X**2).view(5, 1, 1)),
    "chunked": (lambda f: vmap(f, chunk_size=2)(X), X**3),
}


@both
@pytest.mark.parametrize("name", ORDERS)
def test_cube(name, backend) -> None:
    compose, expected = ORDERS[name]
    f = cube(backend)
    close(compose(f), expected)
    close(compose(f), expected)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


OLD_STYLE = {
    "grad": lambda f, x: grad(lambda x: f(x).pow(2).sum())(x),
    "grad grad": lambda f, x: grad(lambda x: grad(lambda x: f(x).pow(3).sum())(x).pow(2).sum())(x),
    "vmap": lambda f, x: vmap(f)(x),
    "vmap in 1": lambda f, x: vmap(f, in_dims=1, out_dims=1)(x),
    "vmap out -1": lambda f, x: vmap(f, out_dims=-1)(x),
    "vmap grad": lambda f, x: vmap(grad(lambda r: f(r).pow(2).sum()))(x),
    "jvp": lambda f, x: jvp(f, (x,), (x.sin(),))[1],
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(lambda x: f(x).pow(2).sum())(x),
    "vmap jacfwd": lambda f, x: vmap(jacfwd(f))(x),
    "vmap hessian": lambda f, x: vmap(hessian(lambda r: f(r).pow(2).sum()))(x),
}


@both
@pytest.mark.parametrize("name", OLD_STYLE)
def test_an_old_style_class(name, backend) -> None:
    """Eager refuses these classes under torch.func; the mathematics is that of torch's own softmax."""
    f = fusegrad.compile(Softmax, backend=backend).apply
    x = leaf(3, 4).detach()
    close(OLD_STYLE[name](f, x), OLD_STYLE[name](softmax, x))


@both
@pytest.mark.parametrize("name", ["grad", "grad grad", "vmap grad", "jvp", "jacrev", "jacfwd", "hessian"])
def test_a_saved_intermediate_is_whole_under_torch_func(name, backend) -> None:
    f = fusegrad.compile(Partial, backend=backend).apply
    x = leaf(2, 3).detach() / 4
    close(OLD_STYLE[name](f, x), OLD_STYLE[name](lambda x: (x.exp() + 1) ** 2, x))


WRONG = {
    "grad": (lambda f: grad(lambda x: f(x).sum())(X), 100 * X),
    "vmap grad": (lambda f: vmap(grad(f))(X), 100 * X),
    "grad vmap": (lambda f: grad(lambda x: vmap(f)(x).sum())(X), 100 * X),
    "jvp": (lambda f: jvp(f, (X,), (torch.ones(5),))[1], 100 * X),
    "jacrev": (lambda f: jacrev(f)(X), torch.diag(100 * X)),
    "jacfwd": (lambda f: jacfwd(f)(X), torch.diag(100 * X)),
    "grad grad": (lambda f: grad(lambda x: grad(lambda x: f(x).sum())(x).sum())(X), torch.full((5,), 100.0)),
    "vmap jvp": (lambda f: vmap(lambda x: jvp(f, (x,), (torch.ones(()),))[1])(X), 100 * X),
    "hessian": (lambda f: hessian(lambda x: f(x).sum())(X), torch.diag(torch.full((5,), 100.0))),
}


@both
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_backward_stays_wrong(name, backend) -> None:
    compose, expected = WRONG[name]
    close(compose(fusegrad.compile(Wrong, backend=backend).apply), expected)


SUITE = {
    "RMSNorm": (RMSNorm, lambda: (leaf(4, 6), leaf(6))),
    "LayerNorm": (LayerNorm, lambda: (leaf(4, 6), leaf(6), leaf(6, seed=2))),
    "SwiGLU": (SwiGLU, lambda: (leaf(4, 6), leaf(4, 6, seed=3))),
    "Softmax": (Softmax, lambda: (leaf(4, 6),)),
    "Linear": (Linear, lambda: (leaf(4, 6), leaf(3, 6), leaf(3))),
    "Wrong": (Wrong, lambda: (leaf(4, 6),)),
    "Cube": (Cube, lambda: (leaf(4, 6),)),
}


@both
@pytest.mark.parametrize("name", SUITE)
def test_jvp_is_the_transpose_of_backward(name, backend) -> None:
    """<jvp(t), g> == <t, backward(g)>."""
    cls, args = SUITE[name]
    fast = fusegrad.compile(cls, backend=backend)
    primals = tuple(a.detach() for a in args())
    tangents = tuple(torch.cos(3 * p + i) for i, p in enumerate(primals))
    f = lambda *a: as_tuple(fast.apply(*a))[0]  # noqa: E731
    y, pushed = jvp(f, primals, tangents)
    g = torch.sin(y + 1)
    pulled = vjp(f, *primals)[1](g)
    close((pushed * g).sum(), sum((t * p).sum() for t, p in zip(tangents, pulled, strict=True)))
    inputs = [p.clone().requires_grad_() for p in primals]
    close(pulled, torch.autograd.grad(as_tuple(cls.apply(*inputs))[0], inputs, g))


@both
@pytest.mark.parametrize("in_dims", [(0, None), (1, None), (None, 0), (0, 0), (2, 1), (-1, 0)])
def test_in_dims(in_dims, backend) -> None:
    fast = fusegrad.compile(SwiGLU, backend=backend)
    plain = lambda a, b: torch.nn.functional.silu(a) * b  # noqa: E731
    shapes = [(3, 4), (3, 4)]
    args = []
    for shape, dim, seed in zip(shapes, in_dims, (0, 1), strict=True):
        full = list(shape)
        if dim is not None:
            full.insert(dim if dim >= 0 else len(full) + 1 + dim, 2)
        args.append(leaf(*full, seed=seed).detach())
    for out in (0, 1, -1):
        close(vmap(fast.apply, in_dims, out)(*args), vmap(plain, in_dims, out)(*args))
    pull = lambda f: vmap(grad(lambda a, b: f(a, b).pow(2).sum(), (0, 1)), in_dims)(*args)  # noqa: E731
    close(pull(fast.apply), pull(plain))
    whole = lambda f: grad(lambda a, b: vmap(f, in_dims)(a, b).pow(2).sum(), (0, 1))(*args)  # noqa: E731
    close(whole(fast.apply), whole(plain))


@both
def test_several_outputs_and_arguments_that_are_no_tensors(backend) -> None:
    class Scaled(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, k, mode):
            return x * k, x.sum(-1) if mode == "sum" else x.mean(-1)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.k, ctx.n, ctx.mode = inputs[1], inputs[0].shape[-1], inputs[2]

        @staticmethod
        def backward(ctx, g, h):
            wide = h.unsqueeze(-1).expand(*h.shape, ctx.n)
            return g * ctx.k + (wide if ctx.mode == "sum" else wide / ctx.n), None, None

    fast = fusegrad.compile(Scaled, backend=backend)
    x = leaf(3, 4).detach()
    pull = lambda c: grad(lambda r: sum(o.pow(2).sum() for o in vmap(c)(r)))(x)  # noqa: E731
    for mode in ("sum", "mean"):
        mine, theirs = (lambda r, cls=cls, mode=mode: cls.apply(r, 2.0, mode) for cls in (fast, Scaled))
        assert_same(vmap(mine)(x), vmap(theirs)(x))
        close(pull(mine), pull(theirs))


@both
def test_undefined_gradients_under_vmap_grad(backend) -> None:
    fast = fusegrad.compile(Cube, backend=backend)
    close(vmap(grad(lambda x: fast.apply(x)[1]))(X), 6 * X)
    close(vmap(grad(lambda x: fast.apply(x)[0] + fast.apply(x)[1]))(X), 3 * X**2 + 6 * X)


def test_mark_non_differentiable_is_kept_where_eager_loses_it() -> None:
    class Marked(Function):
        @staticmethod
        def forward(x):
            return x * 2, x * 3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.mark_non_differentiable(output[1])

        @staticmethod
        def backward(ctx, g, h):
            return g * 2

    fast = fusegrad.compile(Marked)
    close(vmap(grad(lambda x: sum(fast.apply(x))))(X), torch.full((5,), 2.0))


@both
def test_captured_tensors_may_change(backend) -> None:
    box = {"w": torch.full((5,), 2.0)}

    class Boxed(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x * box["w"]

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 2 * g * x * box["w"]

    fast = fusegrad.compile(Boxed, backend=backend)
    for w in (torch.full((5,), 2.0), torch.full((5,), 3.0), torch.full((5,), 4.0)):
        box["w"] = w
        close(grad(lambda x: fast.apply(x).sum())(X), 2 * X * w)
        close(grad(lambda x: grad(lambda x: fast.apply(x).sum())(x).sum())(X), 2 * w)
        close(vmap(fast.apply)(X.expand(2, 5)), (X * X * w).expand(2, 5))
        close(jvp(fast.apply, (X,), (torch.ones(5),))[1], 2 * X * w)
        x = X.clone().requires_grad_()
        (g,) = torch.autograd.grad(fast.apply(x).sum(), x, create_graph=True)
        close(torch.autograd.grad(g.sum(), x)[0], 2 * w)


@both
def test_plain_autograd_and_torch_func_share_a_class(backend) -> None:
    fast = fusegrad.compile(Wrong, backend=backend)
    x = X.clone().requires_grad_()
    for _ in range(2):
        close(torch.autograd.grad(fast.apply(x).sum(), x)[0], 100 * X)
        close(grad(lambda x: fast.apply(x).sum())(X), 100 * X)


def test_a_graph_outside_reaches_through() -> None:
    fast = fusegrad.compile(Wrong)
    x = X.clone().requires_grad_()
    vmap(fast.apply)(x).sum().backward()
    close(x.grad, 100 * X)


def test_a_module_of_many_models() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, cls: Any) -> None:
            super().__init__()
            self.cls, self.w = cls, torch.nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return as_tuple(self.cls.apply(x, self.w))[0]

    fast = Layer(fusegrad.compile(RMSNorm))
    plain = lambda p, x: x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * p["w"]  # noqa: E731
    stacked = {"w": torch.linspace(1, 2, 12).view(3, 4)}
    x = leaf(5, 4).detach()
    loss = lambda f: vmap(grad(lambda p, x: f(p, x).pow(2).sum()), (0, None))(stacked, x)["w"]  # noqa: E731
    close(loss(lambda p, x: functional_call(fast, p, (x,))), loss(plain))


# ------------------------------------------------------------------ dual numbers
@both
def test_dual_numbers(backend) -> None:
    fast = fusegrad.compile(Cube, backend=backend)
    with fwd.dual_level():
        y = fast.apply(fwd.make_dual(X, 2 * X))[0]
        close(fwd.unpack_dual(y).tangent, 6 * X**3)
        close(fwd.unpack_dual(y).primal, X**3)
    close(fast.apply(X)[0], X**3)


# ------------------------------------------------------------------ the user's own rules
class OwnRules(Function):
    """Rules that are recognisable: neither is what would be derived."""

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(inputs[0])
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 5 * x

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * 7 * x

    @staticmethod
    def vmap(info, in_dims, x):
        return OwnRules.apply(x.movedim(in_dims[0], 0)) + 1000 * info.batch_size, 0


@both
@pytest.mark.parametrize(
    "compose",
    [
        lambda f: f(X),
        lambda f: grad(lambda x: f(x).sum())(X),
        lambda f: jvp(f, (X,), (torch.ones(5),)),
        lambda f: vmap(f)(X),
        lambda f: vmap(f, in_dims=1)(X.expand(2, 5)),
        lambda f: grad(lambda x: vmap(f)(x).sum())(X),
        lambda f: vmap(grad(f))(X),
        lambda f: jacfwd(f)(X),
        lambda f: jacrev(f)(X),
    ],
)
def test_the_users_own_rules_win(compose, backend) -> None:
    close(compose(fusegrad.compile(OwnRules, backend=backend).apply), compose(OwnRules.apply))


def test_an_own_vmap_is_not_called_where_nothing_is_batched() -> None:
    fast = fusegrad.compile(OwnRules)
    close(vmap(lambda y: fast.apply(X) + y)(torch.zeros(3)), (2 * X).expand(3, 5))


# ------------------------------------------------------------------ the documentation's numpy examples
def to_numpy(tensor):
    return tensor.cpu().numpy()


class NumpySort(Function):
    @staticmethod
    def forward(x, dim):
        device = x.device
        x = to_numpy(x)
        ind = np.argsort(x, axis=dim)
        ind_inv = np.argsort(ind, axis=dim)
        result = np.take_along_axis(x, ind, axis=dim)
        return (
            torch.tensor(result, device=device),
            torch.tensor(ind, device=device),
            torch.tensor(ind_inv, device=device),
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, dim = inputs
        _, ind, ind_inv = output
        ctx.mark_non_differentiable(ind, ind_inv)
        ctx.save_for_backward(ind, ind_inv)
        ctx.dim = dim

    @staticmethod
    def backward(ctx, grad_output, _0, _1):
        ind, ind_inv = ctx.saved_tensors
        return NumpyTake.apply(grad_output, ind_inv, ind, ctx.dim), None

    @staticmethod
    def vmap(info, in_dims, x, dim):
        x_bdim, _ = in_dims
        x = x.movedim(x_bdim, 0)
        dim = dim if dim >= 0 else dim + x.dim() - 1
        return NumpySort.apply(x, dim + 1), (0, 0, 0)


class NumpyTake(Function):
    @staticmethod
    def forward(x, ind, ind_inv, dim):
        device = x.device
        x = to_numpy(x)
        ind = to_numpy(ind)
        return torch.tensor(np.take_along_axis(x, ind, dim), device=device)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ind, ind_inv, dim = inputs
        ctx.save_for_backward(ind, ind_inv)
        ctx.dim = dim

    @staticmethod
    def backward(ctx, grad_output):
        ind, ind_inv = ctx.saved_tensors
        result = NumpyTake.apply(grad_output, ind_inv, ind, ctx.dim)
        return result, None, None, None

    @staticmethod
    def vmap(info, in_dims, x, ind, ind_inv, dim):
        x_bdim, ind_bdim, ind_inv_bdim, _ = in_dims
        logical_dim = x.dim() if x_bdim is None else x_bdim - 1
        dim = dim if dim >= 0 else dim + logical_dim

        def maybe_expand_bdim_at_front(x, x_bdim):
            if x_bdim is None:
                return x.expand(info.batch_size, *x.shape)
            return x.movedim(x_bdim, 0)

        x = maybe_expand_bdim_at_front(x, x_bdim)
        ind = maybe_expand_bdim_at_front(ind, ind_bdim)
        ind_inv = maybe_expand_bdim_at_front(ind_inv, ind_inv_bdim)
        return NumpyTake.apply(x, ind, ind_inv, dim + 1), 0


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
@pytest.mark.parametrize(
    "compose",
    [
        lambda f, x: f(x),
        lambda f, x: grad(lambda x: (f(x) * torch.arange(3.0)).sum())(x),
        lambda f, x: vmap(f)(x),
        lambda f, x: vmap(f, in_dims=1)(x),
        lambda f, x: vmap(grad(lambda r: (f(r) * torch.arange(3.0)).sum()))(x),
        lambda f, x: grad(lambda x: (vmap(f)(x) * torch.arange(3.0)).sum())(x),
        lambda f, x: jacrev(f)(x),
        lambda f, x: grad(lambda x: grad(lambda x: (f(x) ** 3).sum())(x).sum())(x),
    ],
)
def test_numpy_sort(compose) -> None:
    fast = fusegrad.compile(NumpySort)
    x = leaf(2, 3).detach()
    mine = compose(lambda x, dim=-1: fast.apply(x, dim)[0], x)
    close(mine, compose(lambda x, dim=-1: NumpySort.apply(x, dim)[0], x))
    close(mine, compose(lambda x, dim=-1: x.sort(dim)[0], x))


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_numpy_sort_in_plain_autograd() -> None:
    fast = fusegrad.compile(NumpySort)
    grads = []
    for cls in (fast, NumpySort):
        x = leaf(2, 3)
        y = cls.apply(x, -1)
        (g,) = torch.autograd.grad((y[0] ** 3).sum(), x, create_graph=True)
        grads.append([y[0].detach(), y[1], g.detach(), *torch.autograd.grad(g.sum(), x)])
    assert_same(*grads, bitwise=True)


def test_the_documentations_my_cube() -> None:
    def my_cube(x):
        return fusegrad.compile(Cube).apply(x)[0]

    x = torch.randn([])
    assert torch.allclose(grad(grad(my_cube))(x), 6 * x)


# ------------------------------------------------------------------ refusals
def test_random_numbers_inside_vmap_raise_unless_allowed() -> None:
    class Noise(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x + torch.rand_like(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return g

    fast = fusegrad.compile(Noise)
    mine, theirs = raised(lambda: vmap(fast.apply)(X)), raised(lambda: vmap(Noise.apply)(X))
    assert mine[0] is theirs[0] and "randomness" in mine[1]
    zeros = torch.zeros(4, 3)
    assert len(vmap(fast.apply, randomness="different")(zeros).unique()) == 12
    assert len(vmap(fast.apply, randomness="same")(zeros).unique()) == 3


NONLINEAR = {
    "square": (lambda g: g * g, "multiplies it by itself"),
    "norm": (lambda g: g / (1 + g.norm()), "norm"),
    "clamp": (lambda g: g.clamp(-1, 1), "clamp"),
    "sign": (lambda g: g.sign(), "sign"),
    "abs": (lambda g: g.abs(), "abs"),
    "sort": (lambda g: g.sort()[0], "sort"),
    "relu": (lambda g: torch.relu(g), "relu"),
}


@pytest.mark.parametrize("how", NONLINEAR)
def test_a_backward_that_is_not_linear_has_no_jvp(how) -> None:
    change, why = NONLINEAR[how]

    class Changed(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return change(g)

    fast = fusegrad.compile(Changed)
    for _ in range(2):
        with pytest.raises(fusegrad.FusegradError, match="not linear in its gradients") as found:
            jvp(fast.apply, (X,), (torch.ones(5),))
        assert why in str(found.value) and f"at:   {__file__}:" in str(found.value)
    close(grad(lambda x: fast.apply(x).sum())(X), change(torch.ones(5)))


def test_an_affine_backward_has_no_jvp() -> None:
    class Affine(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g + x

    with pytest.raises(fusegrad.FusegradError, match="not linear"):
        jvp(fusegrad.compile(Affine).apply, (X,), (torch.ones(5),))


class ForwardOnly(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x.sin() * y


@both
def test_forward_alone_has_all_its_rules_derived(backend) -> None:
    f = fusegrad.compile(ForwardOnly, backend=backend).apply
    y = X + 2
    plain = lambda x, y: x.sin() * y  # noqa: E731
    for compose in (
        lambda f: grad(lambda x, y: f(x, y).sum(), (0, 1))(X, y),
        lambda f: jvp(f, (X, y), (y, X)),
        lambda f: vmap(f, (0, None))(X, y),
        lambda f: vmap(grad(f, (0, 1)))(X, y),
        lambda f: hessian(lambda x: f(x, y).sum())(X),
    ):
        close(compose(f), compose(plain))


def test_where_only_a_jvp_is_written_reverse_mode_is_its_transpose() -> None:
    class OnlyJvp(Function):
        @staticmethod
        def forward(x):
            return x * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_forward(inputs[0])

        @staticmethod
        def jvp(ctx, t):
            return 7 * ctx.saved_tensors[0] * t

    fast = fusegrad.compile(OnlyJvp)
    close(jvp(fast.apply, (X,), (X,))[1], 7 * X * X)
    close(grad(lambda x: fast.apply(x).sum())(X), 7 * X)


def test_a_wrong_number_of_tangents_raises_as_in_eager() -> None:
    class Two(Function):
        @staticmethod
        def forward(x):
            return x * 2, x * 3

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def jvp(ctx, t):
            return t * 2

    fast = fusegrad.compile(Two)
    call = lambda c: jvp(c.apply, (X,), (X,))  # noqa: E731
    mine, theirs = raised(lambda: call(fast)), raised(lambda: call(Two))
    assert issubclass(mine[0], theirs[0]) and mine[1] == theirs[1]


def test_two_vmap_rules_at_once_raise_as_in_eager() -> None:
    class Both(OwnRules):
        generate_vmap_rule = True

    assert raised(lambda: vmap(fusegrad.compile(Both).apply)(X)) == raised(lambda: vmap(Both.apply)(X))


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_batches_of_every_size(batch) -> None:
    f = fusegrad.compile(Softmax).apply
    x = leaf(batch, 4).detach()
    close(vmap(f)(x), x.softmax(-1))
    close(vmap(grad(lambda r: f(r).pow(2).sum()))(x), vmap(grad(lambda r: r.softmax(-1).pow(2).sum()))(x))


def test_integers_beside_tensors_under_vmap() -> None:
    f = fusegrad.compile(CrossEntropy).apply
    logits, target = leaf(2, 3, 5).detach(), torch.tensor([[0, 1, 2], [4, 3, 2]])
    plain = torch.nn.functional.cross_entropy
    close(vmap(grad(f))(logits, target), vmap(grad(plain))(logits, target))
    close(vmap(f)(logits, target), vmap(plain)(logits, target))


@pytest.mark.parametrize("make", [lambda g: g, lambda g: g * 1])
def test_a_gradient_handed_on_as_it_is(make) -> None:
    class Through(Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, g):
            return make(g)

    f = fusegrad.compile(Through).apply
    t = torch.linspace(1, 2, 5)
    close(jvp(f, (X,), (t,))[1], t)
    close(jacfwd(f)(X), torch.eye(5))
    close(vmap(grad(f))(X), torch.ones(5))
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x).sum(), x, torch.ones(()), create_graph=True)
    close(g, torch.ones(5))


DETACHED = {
    "detach": lambda g: g.detach() * 3,
    "detach of a copy": lambda g: (g * 1).detach().clone() * 3,
    "data": lambda g: g.data * 3,
    "mask": lambda g: torch.where(X > 0, g, 0.0),
    "scaled": lambda g: g * X.detach(),
}


@both
@pytest.mark.parametrize("how", DETACHED)
def test_detaching_a_gradient_does_not_change_the_jvp(how, backend) -> None:
    change = DETACHED[how]

    class Detached(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return change(g)

    t = torch.linspace(1, 2, 5)
    close(jvp(fusegrad.compile(Detached, backend=backend).apply, (X,), (t,))[1], change(t))


def test_a_gradient_computed_without_grad_mode_has_its_jvp() -> None:
    class Quiet(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            with torch.no_grad():
                return g * 3

    close(jvp(fusegrad.compile(Quiet).apply, (X,), (X,))[1], 3 * X)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batched_gradients_of_plain_autograd(backend) -> None:
    for cls, args in (SUITE["Softmax"], SUITE["RMSNorm"]):
        results = []
        for c in (fusegrad.compile(cls, backend=backend), cls):
            given = args()
            y = as_tuple(c.apply(*given))[0]
            eye = torch.eye(y.numel()).view(-1, *y.shape)
            rows = torch.autograd.grad(y, given, eye, is_grads_batched=True, retain_graph=True)
            loss = lambda x, c=c, rest=given[1:]: as_tuple(c.apply(x, *rest))[0].pow(2).sum()  # noqa: E731
            whole = torch.autograd.functional.hessian(loss, given[0].detach(), vectorize=True)
            mapped = vmap(lambda v, y=y, given=given: torch.autograd.grad(y, given, v, retain_graph=True))(eye)
            results.append([*rows, whole, *mapped])
        assert_same(*results, tolerance=1e-4)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.view(-1), lambda x: x.t()])
def test_outputs_that_alias_inputs(make) -> None:
    class Alias(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return make(x), x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.shape = inputs[0].shape

        @staticmethod
        def backward(ctx, g, h):
            return h * 3

    fast = fusegrad.compile(Alias)
    x = leaf(3, 3).detach()
    for compose in (lambda c: grad(lambda x: c.apply(x)[1].sum())(x), lambda c: vmap(c.apply)(x.expand(2, 3, 3))):
        close(compose(fast), compose(Alias))


def test_own_rules_of_a_function_that_returns_a_number_beside_tensors() -> None:
    """torch counts the tensors that a rule returns, the rule answers for every output."""

    class Counted(Function):
        @staticmethod
        def forward(x):
            return 3, x * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_forward(*inputs)

        @staticmethod
        def jvp(ctx, t):
            return None, 20 * t * ctx.saved_tensors[0]

        @staticmethod
        def vmap(info, in_dims, x):
            return (3, 100 * x * x), (None, in_dims[0])

    fast = fusegrad.compile(Counted)
    close(jvp(lambda x: fast.apply(x)[1], (X,), (torch.ones(5),))[1], 20 * X)
    close(vmap(lambda x: fast.apply(x)[1])(X), 100 * X * X)


def test_double_backward_watches_what_needs_a_gradient() -> None:
    """backward writes into an intermediate of what no gradient is asked for: eager allows it."""

    class Indexed(Function):
        @staticmethod
        def forward(x):
            return x.sum(), x.detach() * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(output[1])

        @staticmethod
        def backward(ctx, g, _):
            grad = ctx.saved_tensors[0].exp()
            grad[0] -= 1
            return grad * g

    def second(apply: Any) -> Tensor:
        x, g = X.clone().requires_grad_(), torch.ones((), requires_grad=True)
        (first,) = torch.autograd.grad(apply(x)[0], x, g, create_graph=True)
        return torch.autograd.grad((first * X).sum(), g)[0]

    close(second(fusegrad.compile(Indexed).apply), second(Indexed.apply))


class BySize(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (2 if x.shape[0] > 4 else 3) * x * g


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("sizes", [(6, 3, 6), (3, 6, 3)])
def test_a_backward_that_asks_for_a_size_is_asked_again_under_vmap(backend, sizes) -> None:
    fast = fusegrad.compile(BySize, backend=backend)
    pull = grad(lambda x: fast.apply(x).sum())
    for n in sizes:
        factor = 2.0 if n > 4 else 3.0
        x = torch.arange(1.0, 2 * n + 1).reshape(2, n)
        close(vmap(pull)(x), factor * x)
        close(vmap(grad(lambda x: pull(x).sum()))(x), torch.full_like(x, factor))
        close(vmap(vmap(pull))(x[None]), factor * x[None])


@pytest.mark.parametrize(("backend", "of_a_batch"), [("reference", 1), ("interpret", 0)])
def test_forward_is_traced_once(backend: str, of_a_batch: int) -> None:
    """Another call like a plain one captures nothing of forward, and a batch is made of the same graph."""
    fast = fusegrad.compile(Doubled, backend=backend)
    x = torch.linspace(-1, 2, 12).view(3, 4)

    def captures(call: Any) -> int:
        before = fusegrad.stats()["captures"]
        call()
        return int(fusegrad.stats()["captures"] - before)

    assert captures(lambda: fast.apply(x)) == 1
    backward = 1  # which has to be one graph for rules to be derived
    assert captures(lambda: vmap(fast.apply)(x.expand(5, 3, 4).contiguous())) == backward + of_a_batch
    leaf = x.clone().requires_grad_()
    fast.apply(leaf).backward(torch.ones(3, 4))
    assert captures(lambda: vjp(fast.apply, x)[1](torch.ones(3, 4))) == 0


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0].sigmoid()
