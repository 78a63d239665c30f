"""Smaller facts of torch 2.13 that a compiled class keeps, and the state of torch that methods run under."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from side_by_side import accumulated, both, gradients, leaf, outcome, plain, same
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import grad, hessian, jacfwd, jacrev, vmap

import fusegrad
from fusegrad.runtime.functorch.partial_second_order import PartialGradientWarning

Tensor = torch.Tensor


class Sine(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos() * 10


def step(c: Any, *shape: int) -> Any:
    x = leaf(*shape or (3,))
    y = c.apply(x)
    return y, gradients(x, of=y) if y.requires_grad else None


# ------------------------------------------------------------------ outputs and hooks
@both
def test_one_tensor_returned_twice_is_one_object_with_all_the_gradient(backend) -> None:
    class Twice(Function):
        @staticmethod
        def forward(ctx, x):
            y = x * 2
            return y, y

        @staticmethod
        def backward(ctx, g, h):
            return 2 * g + 5 * h

    def story(c: Any) -> Any:
        x = leaf(3)
        a, b = c.apply(x)
        (a.sum() + 2 * b.sum()).backward()
        return a is b, accumulated(x)

    same(Twice, story, backend)


def test_a_leafs_hook_fires_where_backward_returns_none() -> None:
    class Nothing(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return None

    def story(c: Any) -> Any:
        x, seen = leaf(3), []
        x.register_hook(lambda g: seen.append(g))
        c.apply(x).sum().backward()
        return seen, accumulated(x)

    same(Nothing, story)


def test_once_differentiable_with_allow_unused_gives_none_and_backward_raises() -> None:
    class Once(Sine):
        @staticmethod
        @once_differentiable
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x

    def unused(c: Any) -> Any:
        x = leaf(3)
        (g,) = torch.autograd.grad(c.apply(x).pow(2).sum(), x, create_graph=True)
        return outcome(lambda x: torch.autograd.grad(g.sum(), x, allow_unused=True), x)

    def raises(c: Any) -> Any:
        x = leaf(3)
        (g,) = torch.autograd.grad(c.apply(x).pow(2).sum(), x, create_graph=True)
        g.sum().backward()

    same(Once, unused)
    same(Once, raises)


@both
def test_jacobians_and_hessians_of_a_class_without_rules(backend) -> None:
    f, x = fusegrad.compile(Sine, backend=backend).apply, plain(4)
    for found, expected in (
        (jacrev(f)(x), torch.diag(10 * x.cos())),
        (jacfwd(f)(x), torch.diag(10 * x.cos())),
        (hessian(lambda x: f(x).sum())(x), torch.diag(-10 * x.sin())),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_saved_value_in_between_is_partial_in_plain_autograd_and_whole_under_torch_func() -> None:
    class Between(Function):
        @staticmethod
        def forward(ctx, x):
            e = x.exp()
            ctx.save_for_backward(e, x)
            return e

        @staticmethod
        def backward(ctx, g):
            e, x = ctx.saved_tensors
            return g * e * x

    def story(c: Any) -> Any:
        x = leaf(3)
        (g,) = torch.autograd.grad(c.apply(x).sum(), x, create_graph=True)
        return g.detach(), torch.autograd.grad(g.sum(), x)

    class Partial(Between):
        """The output is something else: e is neither argument nor output."""

        @staticmethod
        def forward(ctx, x):
            e = x.exp()
            ctx.save_for_backward(e, x)
            return e * 1

    same(Between, story)
    with pytest.warns(PartialGradientWarning, match="takes `e`.*constant") as told:
        fast = same(Partial, story)
        story(fast)
    assert len(told) == 1
    x = plain(3)
    whole = grad(lambda x: grad(lambda x: fast.apply(x).sum())(x).sum())(x)
    torch.testing.assert_close(whole, x.exp() * x + x.exp())


def test_effects_on_what_is_no_argument_happen_at_every_call() -> None:
    buffer, seen = torch.zeros(3), []

    class Writes(Function):
        @staticmethod
        def forward(ctx, x):
            buffer.add_(1)
            return x * buffer

        @staticmethod
        def backward(ctx, g):
            seen.append(1)
            return g

    def story(c: Any) -> Any:
        buffer.zero_()
        seen.clear()
        results = [step(c) for _ in range(3)]
        return results, buffer.clone(), len(seen)

    same(Writes, story, opaque=["forward", "backward"])


def test_captured_tensors_and_globals_may_change() -> None:
    box = {"w": torch.full((3,), 2.0), "k": 1.0}

    class Boxed(Function):
        @staticmethod
        def forward(ctx, x):
            return x * box["w"] * box["k"]

        @staticmethod
        def backward(ctx, g):
            return g * box["w"] * box["k"] * 10

    def story(c: Any) -> Any:
        seen = []
        for k, w in ((1.0, 2.0), (1.0, 3.0), (2.0, 3.0), (1.0, 2.0)):
            box.update(w=torch.full((3,), w), k=k)
            seen.append(step(c))
            box["w"].mul_(2)
            seen.append(step(c))
        return seen

    same(Boxed, story)


def test_random_operations_in_vmap_raise_unless_randomness_says_otherwise() -> None:
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

    mine, theirs = (outcome(lambda c: vmap(c.apply)(plain(3)), c) for c in (fusegrad.compile(Noise), Noise))
    assert type(mine) is type(theirs) is RuntimeError and "randomness" in str(mine)
    for randomness, draws in (("different", 12), ("same", 3)):
        fast = vmap(fusegrad.compile(Noise).apply, randomness=randomness)
        assert len(fast(torch.zeros(4, 3)).unique()) == draws


# ------------------------------------------------------------------ autocast
class Amp(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w, [torch.is_autocast_enabled("cpu")]

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g, _):
        x, w = ctx.saved_tensors
        return (g @ w.t()).float(), (x.t() @ g) * (2 if torch.is_autocast_enabled("cpu") else 3)


class AmpCast(Amp):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w, [torch.is_autocast_enabled("cpu")]


class AmpSetup(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(x, w):
        return x @ w, [torch.is_autocast_enabled("cpu")]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g, _):
        x, w = ctx.saved_tensors
        return g @ w.t().to(g.dtype), x.t().to(g.dtype) @ g


class Bare(Function):
    """Knows nothing of autocast."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w, [torch.is_autocast_enabled("cpu")]

    @staticmethod
    def backward(ctx, g, _):
        x, w = ctx.saved_tensors
        return g @ w.t().to(g.dtype), x.t().to(g.dtype) @ g


def matmul(c: Any, inside: bool, dtype: Any = torch.bfloat16) -> Any:
    x, w = leaf(2, 3), leaf(3, 4, seed=1)
    with torch.autocast("cpu", dtype=dtype):
        y = c.apply(x, w)
        if inside:
            y[0].sum().backward()
    if not inside:
        y[0].sum().backward()
    return y, accumulated(x, w)


@pytest.mark.parametrize("cls", [Amp, AmpCast, Bare], ids=lambda c: c.__name__)
@pytest.mark.parametrize("inside", [True, False])
def test_autocast_around_forward_and_backward(cls, inside) -> None:
    def story(c: Any) -> Any:
        return [matmul(c, inside), matmul(c, inside, torch.float16), matmul(c, inside)]

    same(cls, story)


def test_autocast_of_the_setup_style_as_in_eager() -> None:
    theirs = outcome(lambda c: matmul(c, False), AmpSetup)
    mine = outcome(lambda c: matmul(c, False), fusegrad.compile(AmpSetup))
    assert type(mine) is type(theirs)
    if isinstance(theirs, Exception):
        assert str(mine) == str(theirs)


def test_autocast_nested_switched_off_and_without_its_cache() -> None:
    def story(c: Any) -> Any:
        seen = []
        for cache in (True, False):
            x, w = leaf(2, 3), leaf(3, 4, seed=1)
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
                outer = c.apply(x, w)
                with torch.autocast("cpu", enabled=False):
                    inner = c.apply(x, w)
                again = c.apply(x, w)
            (outer[0].float().sum() + inner[0].sum() + again[0].float().sum()).backward()
            seen.append((outer, inner, again, accumulated(x, w)))
        return [*seen, c.apply(leaf(2, 3), leaf(3, 4))]

    same(Bare, story)
    same(Amp, story)


def test_autocast_under_torch_func() -> None:
    def story(c: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return grad(lambda x: c.apply(x).float().sum())(plain(3, 3))

    class Square(Function):
        @staticmethod
        def forward(x):
            return x @ x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g @ x.t() + x.t() @ g

    same(Square, story, flags=False)


# ------------------------------------------------------------------ the state of torch
@both
def test_inference_mode_and_no_grad(backend) -> None:
    def story(c: Any) -> Any:
        seen = []
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                x = leaf(3).detach()
                y = c.apply(x)
                seen.append((y.is_inference(), y.clone()))
        with torch.inference_mode():
            frozen = torch.ones(3)
        seen.append(outcome(lambda c: c.apply(frozen), c))
        seen.append(str(outcome(lambda c: c.apply(frozen * torch.ones(3, requires_grad=True)), c)))
        return seen, step(c)

    same(Sine, story, backend)


def test_the_default_dtype() -> None:
    class Makes(Function):
        @staticmethod
        def forward(ctx, x):
            return x.to(torch.get_default_dtype()) + torch.ones(3)

        @staticmethod
        def backward(ctx, g):
            return g * torch.full((3,), 2.0)

    def story(c: Any) -> Any:
        seen = []
        try:
            for dtype in (torch.float32, torch.float64, torch.float32):
                torch.set_default_dtype(dtype)
                seen.append(step(c))
        finally:
            torch.set_default_dtype(torch.float32)
        return seen

    same(Makes, story)


def test_deterministic_algorithms() -> None:
    class Scatter(Function):
        @staticmethod
        def forward(ctx, x):
            return torch.zeros(2).index_add(0, torch.tensor([0, 1, 0]), x)

        @staticmethod
        def backward(ctx, g):
            return g[torch.tensor([0, 1, 0])]

    def story(c: Any) -> Any:
        seen = []
        try:
            for on in (False, True, False):
                torch.use_deterministic_algorithms(on)
                seen.append((step(c), torch.are_deterministic_algorithms_enabled()))
        finally:
            torch.use_deterministic_algorithms(False)
        return seen

    same(Scatter, story)


def test_set_grad_enabled_inside_the_methods_does_not_leak() -> None:
    class Switches(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            with torch.enable_grad():
                inside = x.detach().requires_grad_()
                (g,) = torch.autograd.grad((inside**2).sum(), inside)
            return g

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            with torch.set_grad_enabled(True):
                return g * x

    def story(c: Any) -> Any:
        y, found = step(c)
        return y, found[0].detach(), torch.is_grad_enabled()  # eager's gradient drags along a graph of its own

    same(Switches, story)


def test_no_warning_is_shown_for_what_is_compiled() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusegrad.FallbackWarning)
        fast = fusegrad.compile(Sine)
        step(fast)
        vmap(grad(fast.apply))(plain(3))
