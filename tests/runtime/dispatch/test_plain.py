"""Compiled plain functions: their backward is the derivative of their own body."""

from __future__ import annotations

import functools

import pytest
import torch
from function_samples import BACKENDS, Wrong, assert_same, leaf, raised
from torch.func import grad, hessian, jvp, vmap

import fusegrad

both = pytest.mark.parametrize("backend", BACKENDS)
TEMPERATURE = 2.0


def scaled(x, y, scale=2.0):
    """Documented."""
    return (x * y).exp() * scale


def grads(f, *args, **kwargs):
    fresh = [a.detach().clone().requires_grad_() for a in args]
    out = f(*fresh, **kwargs)
    outs = out if isinstance(out, tuple) else (out,)
    return [*(o.detach() for o in outs), *torch.autograd.grad(sum(o.pow(2).sum() for o in outs), fresh)]


@both
def test_values_and_gradients(backend) -> None:
    fast = fusegrad.compile(scaled, backend=backend)
    args = leaf(3, 4), leaf(3, 4, seed=1)
    for _ in range(2):
        assert_same(grads(fast, *args), grads(scaled, *args), tolerance=1e-4)


@both
def test_keywords_and_defaults(backend) -> None:
    fast = fusegrad.compile(backend=backend)(scaled)
    x, y = leaf(3), leaf(3, seed=1)
    for args, kwargs in (((x, y), {"scale": 3.0}), ((x, y, 3.0), {}), ((x,), {"y": y}), ((), {"y": y, "x": x})):
        assert_same([fast(*args, **kwargs).detach()], [scaled(*args, **kwargs).detach()])


def test_it_is_still_the_function() -> None:
    fast = fusegrad.compile(scaled)
    assert (fast.__name__, fast.__doc__, fast.__module__) == (scaled.__name__, "Documented.", scaled.__module__)
    assert fast.__wrapped__ is scaled
    assert "scaled" in fast(leaf(3), leaf(3)).grad_fn.name()


def test_wrong_calls_raise_type_errors() -> None:
    fast = fusegrad.compile(scaled)
    for call in (lambda f: f(leaf(3)), lambda f: f(leaf(3), leaf(3), 1.0, 2.0), lambda f: f(leaf(3), z=1)):
        assert raised(lambda c=call: c(fast))[0] is raised(lambda c=call: c(scaled))[0] is TypeError


def test_keyword_only_arguments_are_refused_by_name() -> None:
    def f(x, *, k=2.0):
        return x * k

    with pytest.raises(TypeError, match="keyword-only"):
        fusegrad.compile(f)(leaf(3))


@both
def test_several_outputs_and_arguments_that_are_not_used(backend) -> None:
    def f(x, unused, k):
        return x * k, x.sum(-1)

    fast = fusegrad.compile(f, backend=backend)
    x, unused = leaf(3, 4), leaf(2)
    a, b = fast(x, unused, 3)
    (a.sum() + b.pow(2).sum()).backward()
    p = x.detach().clone().requires_grad_()
    (p.mul(3).sum() + p.sum(-1).pow(2).sum()).backward()
    torch.testing.assert_close(x.grad, p.grad)
    assert unused.grad is None


@both
def test_higher_orders_and_transforms(backend) -> None:
    fast = fusegrad.compile(scaled, backend=backend)
    x = torch.linspace(-1, 1, 4)
    for compose in (
        lambda f: grad(lambda x: f(x, x).sum())(x),
        lambda f: vmap(f, (0, None))(x, x),
        lambda f: vmap(f, (0, 0, None))(x, x, 3.0),
        lambda f: hessian(lambda x: f(x, x + 1).sum())(x),
        lambda f: jvp(lambda x: f(x, x), (x,), (x + 1,))[1],
        lambda f: vmap(grad(lambda x: f(x, x)))(x),
    ):
        torch.testing.assert_close(compose(fast), compose(scaled), rtol=1e-4, atol=1e-4)


def test_second_order_in_plain_autograd() -> None:
    fast = fusegrad.compile(scaled)
    results = []
    for f in (fast, scaled):
        x, y = leaf(4), leaf(4, seed=1)
        first = torch.autograd.grad(f(x, y).sum(), (x, y), create_graph=True)
        results.append(torch.autograd.grad(sum(g.pow(2).sum() for g in first), (x, y)))
    assert_same(*results, tolerance=1e-4)


@both
def test_a_custom_function_inside_keeps_its_own_backward(backend) -> None:
    @fusegrad.compile(backend=backend)
    def f(x):
        return Wrong.apply(x * 2)

    x = leaf(4)
    f(x).sum().backward()
    torch.testing.assert_close(x.grad, 400 * x.detach())
    torch.testing.assert_close(grad(lambda x: f(x).sum())(x.detach()), 400 * x.detach())


def test_globals_are_read_again() -> None:
    global TEMPERATURE
    fast = fusegrad.compile(lambda x: x / TEMPERATURE)
    try:
        for TEMPERATURE in (2.0, 4.0, 2.0):
            x = leaf(3)
            fast(x).sum().backward()
            assert x.grad.tolist() == [1 / TEMPERATURE] * 3
    finally:
        TEMPERATURE = 2.0


@pytest.mark.parametrize("make", [lambda: lambda x: x * 2, lambda: functools.partial(scaled, leaf(3).detach()),
                                  lambda: torch.nn.functional.gelu, lambda: torch.nn.GELU()])  # fmt: skip
def test_callables_of_every_kind(make) -> None:
    f = make()
    x = leaf(3)
    torch.testing.assert_close(fusegrad.compile(f)(x), f(x))


def test_an_opaque_function_runs_as_written() -> None:
    def f(x):
        return x * x.sum().item()

    fast = fusegrad.compile(f)
    with pytest.warns(fusegrad.FallbackWarning, match="reads the data of a tensor"):
        assert_same([fast(leaf(3)).detach()], [f(leaf(3)).detach()])
    x, p = leaf(3), leaf(3)
    fast(x).sum().backward()
    f(p).sum().backward()
    torch.testing.assert_close(x.grad, p.grad)


def layers(x, w1, w2, w3):
    return torch.tanh(torch.tanh(torch.tanh(x @ w1) @ w2) @ w3)


def normalized(x, w):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def attention(q, k, v):
    return torch.softmax(q @ k.mT / 2, -1) @ v


def loss(x, w):
    return -torch.log_softmax(x * w, -1)[:, 0].mean()


def running(x):
    return torch.cumsum(x.exp(), 0).log()


SHARED = {  # launches forward and backward, and bytes kept for backward besides the arguments, at most
    layers: ((leaf(6, 4), leaf(4, 4), leaf(4, 4, seed=1), leaf(4, 4, seed=2)), (6, 9), 3 * 6 * 4 * 4),
    normalized: ((leaf(6, 4), leaf(4)), (1, 1), 6 * 4),
    attention: ((leaf(6, 4), leaf(5, 4), leaf(5, 3)), (3, 5), 6 * 5 * 4),
    loss: ((leaf(6, 4), leaf(4)), (1, 1), 6 * 4 * 2),
    running: ((leaf(6, 4),), (1, 2), 6 * 4 * 4),
    scaled: ((leaf(6, 4), leaf(6, 4, seed=1)), (1, 1), 0),
}


@pytest.mark.parametrize("f", SHARED, ids=lambda f: f.__name__)
def test_backward_takes_over_what_forward_computed(f) -> None:
    args, (forward, backward), more = SHARED[f]
    found = fusegrad.explain(fusegrad.compile(f, backend="interpret"), *args, target="cuda:90").to_dict()
    assert found["launches"]["forward"] <= forward and found["launches"]["backward"] <= backward
    assert found["saved_bytes"] - sum(a.numel() * 4 for a in args) <= more


@pytest.mark.parametrize("f", SHARED, ids=lambda f: f.__name__)
def test_gradients_of_every_order_from_what_was_taken_over(f) -> None:
    fast, args = fusegrad.compile(f, backend="interpret"), SHARED[f][0]
    for g in (fast, f):
        outs = [g(*args) for _ in range(2)]
        first = torch.autograd.grad(outs[0].pow(2).sum(), args)
        again = torch.autograd.grad(outs[1].pow(2).sum(), args, create_graph=True)
        second = torch.autograd.grad(sum(a.pow(2).sum() for a in again), args)
        results = [*first, *(a.detach() for a in again), *second]
        if g is fast:
            mine = results
    assert_same(mine, results, tolerance=2e-3)


def test_an_argument_that_is_changed_before_backward_is_noticed() -> None:
    fast = fusegrad.compile(layers, backend="interpret")
    x, *weights = (a.detach().clone().requires_grad_(i > 0) for i, a in enumerate(SHARED[layers][0]))
    out = fast(x, *weights).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_a_gradient_of_another_layout_takes_over_the_same() -> None:
    fast = fusegrad.compile(normalized, backend="interpret")
    for gradient in (torch.ones(6, 4), torch.ones(4, 6).t(), torch.ones(()).expand(6, 4), torch.ones(6, 8)[:, ::2]):
        both = [torch.autograd.grad(f(*SHARED[normalized][0]), SHARED[normalized][0], gradient)
                for f in (fast, normalized)]  # fmt: skip
        assert_same(*both, tolerance=1e-4)


def test_what_no_gradient_needs_may_be_written_to() -> None:
    """Eager keeps `k` for the gradient of w alone, which is not asked for."""

    def f(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        k = y[-1].clone()
        products = []
        for _ in range(3):
            k[1:] += 1
            products.append(w * k)
        return torch.stack(products)

    y, w = torch.randn(4, 3, requires_grad=True), torch.randn(3)
    fast = fusegrad.compile(f)
    expected, found = (torch.autograd.grad(call(y, w).sin().sum(), y) for call in (f, fast))
    assert torch.equal(expected[0], found[0])


@pytest.mark.filterwarnings("error::fusegrad.FallbackWarning")
def test_products_fold_by_what_needs_a_gradient() -> None:
    """torch folds the batch of a product into its rows where a matrix that was computed needs a gradient."""
    x, w = torch.randn(2, 19, 8, requires_grad=True), torch.randn(19, 19, requires_grad=True)

    def mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.exp(w) @ torch.exp(x)

    found = fusegrad.compile(mixed, backend="reference")(x, w)
    assert torch.equal(found, mixed(x, w))
