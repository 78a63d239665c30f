"""Lines 19 to 21 of docs/contract.md: every composition runs the user's rules, with kernels at the bottom."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from side_by_side import both, leaf, outcome, plain
from side_by_side import same as same_with_flags
from torch.autograd import Function
from torch.autograd import forward_ad as fwd
from torch.autograd.function import once_differentiable
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fusegrad
from fusegrad.runtime.functorch.rules.batched_rules import WrittenByEveryLane

Tensor = torch.Tensor
X = torch.linspace(-1, 2, 5)
T = torch.linspace(1, 2, 5)


def same(cls: Any, story: Any, backend: str = "reference", **options: Any) -> Any:
    return same_with_flags(cls, story, backend, flags=False, **options)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def compiled(fast: Any) -> bool:
    """Nothing of the class was left to the user's own methods."""
    return all(r.status == "compiled" for r in fast._fusegrad.ledger.records.values())


# ------------------------------------------------------------------ 19
class Recorded(Function):
    """Three rules that no derivation would give; its vmap writes down what it was told."""

    seen: list[Any] = []  # noqa: RUF012

    @staticmethod
    def forward(x, k):
        return x * k, x.sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.k = inputs[1]
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        return g * 5 * x + h, None

    @staticmethod
    def jvp(ctx, t, _):
        (x,) = ctx.saved_tensors
        return t * 7 * x, t.sum() * ctx.k

    @staticmethod
    def vmap(info, in_dims, x, k):
        Recorded.seen.append((info.batch_size, info.randomness, in_dims, tuple(x.shape)))
        x = x.movedim(in_dims[0], 0)
        return (Recorded.apply(x, k)[0] + 1000, x.flatten(1).sum(1)), (0, 0)


COMPOSED = {
    "grad": lambda f: grad(lambda x: f(x, 2.0)[0].sum())(X),
    "grad grad": lambda f: grad(lambda x: grad(lambda x: f(x, 2.0)[0].sum())(x).sum())(X),
    "vjp": lambda f: vjp(lambda x: f(x, 2.0), X)[1]((T, torch.ones(()))),
    "jvp": lambda f: jvp(lambda x: f(x, 2.0), (X,), (T,)),
    "vmap": lambda f: vmap(lambda x: f(x, 2.0))(X.expand(3, 5)),
    "in_dims": lambda f: vmap(f, in_dims=(1, None))(X.expand(3, 5), 2.0),
    "randomness": lambda f: vmap(lambda x: f(x, 2.0), randomness="different")(X.expand(3, 5)),
    "chunks": lambda f: vmap(lambda x: f(x, 2.0), chunk_size=2)(X.expand(3, 5)),
    "nested": lambda f: vmap(vmap(lambda x: f(x, 2.0)))(X.expand(2, 3, 5)),
    "vmap grad": lambda f: vmap(grad(lambda x: f(x, 2.0)[0].sum()))(X.expand(3, 5)),
    "grad vmap": lambda f: grad(lambda x: vmap(lambda x: f(x, 2.0))(x)[0].sum())(X.expand(3, 5)),
    "vmap jvp": lambda f: vmap(lambda x, t: jvp(lambda x: f(x, 2.0), (x,), (t,)))(X.expand(3, 5), T.expand(3, 5)),
    "jvp vmap": lambda f: jvp(vmap(lambda x: f(x, 2.0)), (X.expand(3, 5),), (T.expand(3, 5),)),
    "jacfwd": lambda f: jacfwd(lambda x: f(x, 2.0)[0])(X),
    "jacrev": lambda f: jacrev(lambda x: f(x, 2.0)[0])(X),
    "nothing batched": lambda f: vmap(lambda y: f(X, 2.0)[0] + y)(torch.zeros(3)),
}


@both
@pytest.mark.parametrize("name", COMPOSED)
def test_19_every_composition_runs_the_users_own_rules(name, backend) -> None:
    def story(c: Any) -> Any:
        Recorded.seen.clear()
        return COMPOSED[name](c.apply), list(Recorded.seen)

    same(Recorded, story, backend)


@pytest.mark.parametrize("out_dims", [0, 1, -1, (0,), None, (0, 0), "text", (None,)], ids=str)
def test_19_out_dims_of_an_own_vmap_are_read_as_torch_reads_them(out_dims) -> None:
    class Owner(Function):
        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return g

        @staticmethod
        def vmap(info, in_dims, x):
            return Owner.apply(x), out_dims

    same(Owner, lambda c: vmap(c.apply)(plain(3, 3)))


@pytest.mark.parametrize("result", [lambda x: x, lambda x: (x, 0, 0), lambda x: [x, 0]])
def test_19_an_own_vmap_that_returns_anything_else_raises(result) -> None:
    class Owner(Function):
        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def vmap(info, in_dims, x):
            return result(x)

    same(Owner, lambda c: vmap(c.apply)(plain(3, 3)))


def test_19_containers_of_tensors_are_batched_and_not_tracked() -> None:
    class Listed(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, weights):
            return x * weights["w"]

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0], inputs[1]["w"])

        @staticmethod
        def backward(ctx, g):
            _, w = ctx.saved_tensors
            return g * w * 10, None

    x, w = plain(3, 4), plain(3, 4, seed=1)
    for story in (
        lambda c: vmap(lambda x, w: c.apply(x, {"w": w}))(x, w),
        lambda c: vmap(lambda x: c.apply(x, {"w": w[0]}))(x),
        lambda c: grad(lambda x: c.apply(x, {"w": w}).sum())(x),
        lambda c: grad(lambda w: (c.apply(x, {"w": w}) + w).sum())(w),
        lambda c: vmap(grad(lambda x, w: c.apply(x, {"w": w}).sum()))(x, w),
    ):
        same(Listed, story)


def test_19_an_own_vmap_gets_containers_as_the_user_gave_them() -> None:
    class Listed(Function):
        @staticmethod
        def forward(x, weights, k):
            return x * weights["w"] * k

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return g * 10, None, None

        @staticmethod
        def vmap(info, in_dims, x, weights, k):
            assert in_dims == (0, {"w": 1}, None)
            return Listed.apply(x, {"w": weights["w"].movedim(1, 0)}, k), 0

    same(Listed, lambda c: vmap(lambda x, w: c.apply(x, {"w": w}, 3.0), (0, 1))(plain(3, 4), plain(4, 3)))


SHOWN = {
    "the argument": lambda x: (x,),
    "a row": lambda x: (x[1],),
    "its transpose": lambda x: (x.t(),),
    "flat": lambda x: (x.reshape(-1),),
    "detached": lambda x: (x.detach(),),
    "two views": lambda x: (x[:1], x[1:]),
    "a result and its transpose": lambda x: (lambda y: (y, y.t()))(x * 2),
    "parts of what nobody else sees": lambda x: (x * 2).unbind(0),
    "in another order of axes": lambda x: ((x * 2).t(),),
    "the same in all lanes": lambda x: (x * 2, torch.zeros(2, 2).t()),
}


def showing(make: Any) -> Any:
    class Shows(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return make(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.shape = inputs[0].shape

        @staticmethod
        def backward(ctx, *gradients):
            return sum(g.sum() for g in gradients).expand(ctx.shape)

    return Shows


@both
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("shown", SHOWN)
def test_19_lanes_show_the_memory_that_a_single_call_shows(shown, depth, backend) -> None:
    def story(c: Any) -> Any:
        x = torch.arange(36.0).reshape(2, 3, 2, 3)[(0,) * (2 - depth)]

        def written(t: Tensor) -> Any:
            results = c.apply(t)
            results[0].mul_(3)
            return results

        for _ in range(depth):
            written = vmap(written)
        results = written(x)
        return x, results, results[0].stride()

    same(showing(SHOWN[shown]), story, backend)


@both
def test_19_what_is_the_same_in_all_lanes_stands_still(backend) -> None:
    class Zeros(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return torch.zeros(g.shape)

    def story(c: Any) -> Any:
        gradient = vmap(grad(lambda t: c.apply(t).sum()))(torch.ones(3, 4, 5))
        return gradient, gradient.stride()

    same(Zeros, story, backend)


# ------------------------------------------------------------------ 20
@both
def test_20_mark_non_differentiable_is_kept_where_eager_loses_it(backend) -> None:
    class Marked(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x * 2, x * 3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.mark_non_differentiable(output[1])

        @staticmethod
        def backward(ctx, g, h):
            return g * 2

    def both_outputs(c: Any) -> Any:
        return vmap(grad(lambda x: sum(c.apply(x))))(X), grad(lambda x: sum(o.sum() for o in vmap(c.apply)(x)))(X)

    fast = fusegrad.compile(Marked, backend=backend)
    close(both_outputs(fast), (torch.full((5,), 2.0),) * 2)
    assert compiled(fast)


class InPlace(Function):
    """Writes to its argument; jvp does the same to the tangent."""

    @staticmethod
    def forward(x):
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return g * 20


class InPlaceJvp(InPlace):
    @staticmethod
    def jvp(ctx, t):
        return t.mul_(70)


def written(c: Any, x: Tensor) -> Any:
    y = x * 1
    out = c.apply(y)
    return (out + y).sum()


@both
@pytest.mark.parametrize("cls", [InPlace, InPlaceJvp])
def test_20_mark_dirty_under_grad(cls, backend) -> None:
    same(cls, lambda c: grad(lambda x: written(c, x))(X), backend)
    same(cls, lambda c: vjp(lambda x: c.apply(x * 1), X)[1](T), backend)


@both
def test_20_mark_dirty_under_vmap_where_eager_fails(backend) -> None:
    class Generated(InPlace):
        generate_vmap_rule = True

    fast = fusegrad.compile(Generated, backend=backend)
    with pytest.raises(RuntimeError):
        vmap(lambda x: Generated.apply(x * 1))(X)
    for dim in (0, 1):
        x = torch.arange(6.0).view(2, 3)

        def change(r: Tensor) -> Any:
            y = r * 1
            return fast.apply(y), y

        close(vmap(change, dim, dim)(x), (2 * x, 2 * x))
    close(vmap(grad(lambda x: written(fast, x)))(X), torch.full((5,), 40.0))
    close(grad(lambda x: vmap(lambda x: fast.apply(x * 1))(x).sum())(X), torch.full((5,), 20.0))
    assert compiled(fast)


@both
def test_20_mark_dirty_writes_the_tensor_that_was_given(backend) -> None:
    fast = fusegrad.compile(InPlace, backend=backend)
    x = X.clone()
    vmap(fast.apply)(x)
    close(x, 2 * X)
    grad(lambda k: (k * fast.apply(x)).sum())(torch.ones(()))
    close(x, 4 * X)


@both
def test_20_an_in_place_forward_has_its_tangent_written_and_returned(backend) -> None:
    same(InPlaceJvp, lambda c: jvp(lambda x: c.apply(x * 1), (X,), (T,)), backend)
    fast = fusegrad.compile(InPlace, backend=backend)
    close(jvp(lambda x: c_of(fast, x), (X,), (T,)), (2 * X, 20 * T))

    def dual(c: Any) -> Any:
        with fwd.dual_level():
            t = T.clone()
            x = fwd.make_dual(X.clone(), t)
            y = c.apply(x)
            return y is x, fwd.unpack_dual(y).tangent.clone(), t

    same(InPlaceJvp, dual, backend)
    close(dual(fast)[1:], (20 * T, 20 * T))
    assert compiled(fast)


def c_of(c: Any, x: Tensor) -> Tensor:
    return c.apply(x * 1)


def test_20_a_tangent_that_is_not_written_raises() -> None:
    class NotWritten(InPlace):
        @staticmethod
        def jvp(ctx, t):
            return t * 70

    same(NotWritten, lambda c: jvp(lambda x: c.apply(x * 1), (X,), (T,)))


def test_20_different_tensors_saved_for_forward_and_for_backward() -> None:
    class Different(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, y):
            return x * y, x + 1

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[1], output[1])
            ctx.save_for_forward(inputs[0])

        @staticmethod
        def backward(ctx, g, h):
            y, z = ctx.saved_tensors
            return g * y * 10, g * z

        @staticmethod
        def jvp(ctx, t, s):
            (x,) = ctx.saved_tensors
            return t * x * 100, t * 3

    fast = fusegrad.compile(Different)
    close(vmap(lambda x, y: jvp(fast.apply, (x, y), (x, y)))(X, T)[1], (X * X * 100, X * 3))
    close(jvp(vmap(fast.apply), (X, T), (X, T))[1], (X * X * 100, X * 3))
    close(vmap(grad(lambda x, y: fast.apply(x, y)[0]))(X, T), T * 10)
    close(vmap(grad(lambda x, y: fast.apply(x, y)[0], 1))(X, T), X + 1)
    same(Different, lambda c: jvp(c.apply, (X, T), (X, T)))


# ------------------------------------------------------------------ 21
@both
def test_21_a_backward_on_purpose_wrong_is_what_runs_everywhere(backend) -> None:
    class Wrong(Function):
        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x * 100

    fast = fusegrad.compile(Wrong, backend=backend)
    f, hundred = fast.apply, 100 * X
    diagonal = torch.diag(hundred)
    for found, expected in (
        (grad(lambda x: f(x).sum())(X), hundred),
        (vmap(grad(f))(X), hundred),
        (jvp(f, (X,), (T,))[1], hundred * T),
        (jacrev(f)(X), diagonal),
        (jacfwd(f)(X), diagonal),
        (hessian(lambda x: f(x).sum())(X), torch.full((5,), 100.0).diag()),
        (vmap(lambda x: jvp(f, (x,), (torch.ones(()),))[1])(X), hundred),
        (functional_call(Module(f), {"w": X}, ()), X.sin()),
    ):
        close(found, expected)
    assert compiled(fast)


class Module(torch.nn.Module):
    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f, self.w = f, torch.nn.Parameter(torch.zeros(5))

    def forward(self) -> Tensor:
        return self.f(self.w)


@both
def test_21_an_own_jvp_serves_every_level_of_vmap(backend) -> None:
    """`jvp` of a vmap whose rule is derived runs the jvp that the user wrote, lane by lane."""

    class OnlyJvp(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, y):
            return x * y, y.sum()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_forward(*inputs)

        @staticmethod
        def jvp(ctx, t, s):
            x, _ = ctx.saved_tensors
            return 7 * x * t + s, 3 * s.sum()

    x, y = plain(3, 4), plain(4)
    for story in (
        lambda c: jvp(vmap(c.apply, (0, None)), (x, y), (x, y)),
        lambda c: vmap(lambda x: jvp(c.apply, (x, y), (x, y)))(x),
        lambda c: jvp(lambda x: vmap(c.apply, (0, None))(x, y), (x,), (x,)),
        lambda c: jvp(vmap(vmap(c.apply, (0, None)), (0, None)), (x[None], y), (x[None], y)),
    ):
        same(OnlyJvp, story, backend)


def test_21_an_own_vmap_beside_values_that_setup_context_computes() -> None:
    class Keeps(Function):
        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0] * output)
            ctx.note = [output + 1]

        @staticmethod
        def backward(ctx, g):
            (kept,) = ctx.saved_tensors
            return g * kept + ctx.note[0]

        @staticmethod
        def vmap(info, in_dims, x):
            return Keeps.apply(x.movedim(in_dims[0], 0)) + 1000, 0

    x = plain(3, 5)
    for story in (
        lambda c: vmap(grad(lambda x: c.apply(x).sum()))(x),
        lambda c: grad(lambda x: vmap(c.apply)(x).sum())(x),
        lambda c: vmap(c.apply, 1)(x),
        lambda c: vmap(vmap(grad(c.apply)))(x),
    ):
        same(Keeps, story, tolerance=1e-6)


def test_21_an_own_jvp_beside_values_that_forward_keeps() -> None:
    class Keeps(Function):
        @staticmethod
        def forward(ctx, x):
            e = x.exp()
            ctx.save_for_backward(e)
            ctx.save_for_forward(e)
            ctx.k = 3.0
            return e + 1

        @staticmethod
        def backward(ctx, g):
            (e,) = ctx.saved_tensors
            return g * e * 10

        @staticmethod
        def jvp(ctx, t):
            (e,) = ctx.saved_tensors
            return t * e * 100 * ctx.k

    fast = fusegrad.compile(Keeps)
    e = X.exp()
    close(jvp(fast.apply, (X,), (T,))[1], T * e * 300)
    close(grad(lambda x: fast.apply(x).sum())(X), e * 10)
    close(vmap(lambda x, t: jvp(fast.apply, (x,), (t,))[1])(X, T), T * e * 300)
    close(jvp(vmap(fast.apply), (X,), (T,))[1], T * e * 300)
    close(jvp(grad(lambda x: fast.apply(x).sum()), (X,), (T,))[1], e * 10 * T)
    assert compiled(fast)


ALIASES = {
    "identity": lambda x: x,
    "view_as": lambda x: x.view_as(x),
    "flat": lambda x: x.view(-1),
    "transposed": lambda x: x.t(),
    "row": lambda x: x[1],
    "detached": lambda x: x.detach(),
}


@both
@pytest.mark.parametrize("kind", ALIASES)
def test_21_outputs_that_are_views_of_arguments(kind, backend) -> None:
    make = ALIASES[kind]

    class Reversed(Function):
        """Gradient reversal: what is returned is a view, the gradient is not its derivative."""

        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return make(x), x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.shape = inputs[0].shape

        @staticmethod
        def backward(ctx, g, h):
            return -(g.expand(3, 3) if g.dim() == 1 and g.numel() == 3 else g.reshape(3, 3)) + h * 10

    x = plain(3, 3)
    for story in (
        lambda c: grad(lambda x: c.apply(x)[0].pow(2).sum())(x),
        lambda c: grad(lambda x: sum(o.sum() for o in c.apply(x)))(x),
        lambda c: vmap(c.apply)(x.expand(2, 3, 3)),
        lambda c: vmap(grad(lambda x: c.apply(x)[0].pow(2).sum()))(x.expand(2, 3, 3)),
    ):
        fast = same(Reversed, story, backend)
    tangent = plain(3, 3, seed=4)
    y, pushed = jvp(lambda x: fast.apply(x), (x,), (tangent,))
    g = [torch.sin(o + 1) for o in y]
    (pulled,) = vjp(lambda x: fast.apply(x), x)[1](tuple(g))
    close(sum((p * c).sum() for p, c in zip(pushed, g, strict=True)), (tangent * pulled).sum())
    assert compiled(fast)


def test_21_a_view_output_with_an_own_jvp_wants_a_view_of_the_tangent() -> None:
    def make(rule: Any) -> Any:
        class Viewed(Function):
            @staticmethod
            def forward(x):
                return x.view(-1)

            @staticmethod
            def setup_context(ctx, inputs, output):
                pass

            @staticmethod
            def jvp(ctx, t):
                return rule(t)

        return Viewed

    x, t = plain(2, 3), plain(2, 3, seed=1)
    for rule in (lambda t: t.view(-1), lambda t: t.reshape(-1).clone()):
        same(make(rule), lambda c: jvp(c.apply, (x,), (t,)))


def test_21_a_write_to_an_argument_beside_a_kept_value_is_left_to_the_user_on_record() -> None:
    class Keeps(Function):
        @staticmethod
        def forward(x):
            return x.mul_(2)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.mark_dirty(inputs[0])
            ctx.save_for_backward(output * 3)

        @staticmethod
        def backward(ctx, g):
            (kept,) = ctx.saved_tensors
            return g * kept

    fast = same(Keeps, lambda c: grad(lambda x: written(c, x))(X), opaque=["torch.func"])
    record = fast._fusegrad.ledger.records["torch.func"]
    assert "writes to an argument" in record.reason and record.where.startswith(__file__)
    strict = fusegrad.compile(Keeps, fullgraph=True)
    assert isinstance(outcome(lambda c: grad(lambda x: written(c, x))(X), strict), fusegrad.NotTraceableError)


def test_21_nothing_is_inferred_from_requires_grad_of_wrappers() -> None:
    class Asks(Function):
        @staticmethod
        def forward(x, y):
            return x * y

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.needs = ctx.needs_input_grad
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            x, y = ctx.saved_tensors
            return (g * y * 10 if ctx.needs_input_grad[0] else None), (g * x if ctx.needs[1] else None)

    for story in (
        lambda c: grad(lambda x: c.apply(x, T).sum())(X),
        lambda c: grad(lambda y: c.apply(X, y).sum())(T),
        lambda c: grad(lambda x, y: c.apply(x, y).sum(), (0, 1))(X, T),
        lambda c: grad(lambda x: grad(lambda y: c.apply(x, y).sum())(T).sum())(X),
    ):
        same(Asks, story)


def test_21_a_graph_outside_of_the_transform_is_reached() -> None:
    def story(c: Any) -> Any:
        x = leaf(3, 5)
        Recorded.seen.clear()
        vmap(lambda r: c.apply(r, 2.0)[0])(x).sum().backward()
        return x.grad

    same(Recorded, story)


class ComparedToo(Function):
    """Hands out a bool, whose gradient is None without materialisation: backward counts on it."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return x * y, x > y

    @staticmethod
    def backward(ctx, g, of_bool):
        assert of_bool is None
        x, y = ctx.saved_tensors
        return g * y, g * x


@both
def test_15_a_bool_output_has_no_gradient_under_transforms_either(backend) -> None:
    fast = fusegrad.compile(ComparedToo, backend=backend)
    x, y = plain(3), plain(3).cos()

    def f(x, y):
        return fast.apply(x, y)[0]

    close(grad(lambda x: f(x, y).sum())(x), y)
    close(jvp(f, (x, y), (y, x))[1], y * y + x * x)
    close(vmap(grad(f))(x, y), y)
    assert set(fast._fusegrad.ledger.records) <= {"forward", "backward"}
    assert fast._fusegrad.keys.opaque("backward") is None


def test_a_write_into_what_has_no_batch_axis_is_refused_by_name() -> None:
    class Accumulates(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.mark_dirty(x)
            return x.add_(y)

        @staticmethod
        def backward(ctx, g):
            return g, g

    fast = fusegrad.compile(Accumulates)
    with pytest.raises(WrittenByEveryLane, match="writes into `x`"):
        vmap(lambda x, y: fast.apply(x.clone(), y), (None, 0))(plain(3), plain(2, 3))


class SavesForGradients(Function):
    """What no gradient is asked of keeps nothing, and backward could not run."""

    @staticmethod
    def forward(ctx, x):
        if x.requires_grad:
            ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


class SavesWhereItIsNeeded(SavesForGradients):
    @staticmethod
    def forward(ctx, x):
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(x)
        return x * x


@pytest.mark.parametrize("cls", [SavesForGradients, SavesWhereItIsNeeded])
def test_21_a_forward_that_keeps_nothing_without_gradients_is_batched(cls) -> None:
    fast, xs = fusegrad.compile(cls), plain(3, 4)
    assert torch.equal(torch.func.vmap(fast.apply)(xs), xs * xs)
    assert torch.equal(torch.func.grad(lambda x: torch.func.vmap(fast.apply)(x).sum())(xs), 2 * xs)
    assert torch.equal(torch.func.vmap(torch.func.grad(lambda x: fast.apply(x).sum()))(xs), 2 * xs)
    assert torch.equal(torch.func.jvp(fast.apply, (xs,), (torch.ones_like(xs),))[1], 2 * xs)
    assert not [r for r in fast._fusegrad.ledger.records.values() if r.status == "opaque"]


def test_a_forward_that_returns_nothing_beside_a_vmap_that_returns_all() -> None:
    class OfBatches(Function):
        @staticmethod
        def forward(x: Any) -> None:
            pass

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Any) -> Any:
            return x * 2, in_dims[0]

    x = torch.randn(3, 2)
    fast = fusegrad.compile(OfBatches)
    for _ in range(3):
        torch.testing.assert_close(torch.func.vmap(fast.apply)(x), x * 2)
        torch.testing.assert_close(torch.func.vmap(fast.apply, 1, 1)(x), x * 2)
    assert fast.apply(x) is None


# ------------------------------------------------------------------ what is refused on the way
class KeptWithParts(Function):
    """It writes to parts of values that it keeps, and to one as a whole in another dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        y[:, ::2] *= -1
        wide = torch.zeros_like(x, dtype=torch.float64)
        wide.copy_(y[0])
        ctx.save_for_backward(x)
        ctx.y, ctx.wide = y, wide
        return y.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        sign = torch.ones_like(x)
        sign[:, ::2] = -1
        return g * ctx.y.cos() * sign * 2 * x + (ctx.wide * 0).to(x.dtype)


@both
def test_21_a_write_to_a_part_of_a_kept_value_is_differentiated(backend) -> None:
    fast, x = fusegrad.compile(KeptWithParts, backend=backend), plain(3, 4)
    sign = torch.tensor([-1.0, 1.0, -1.0, 1.0])

    def whole(x: Tensor) -> Tensor:
        return (sign * x * x).sin()

    def ours(x: Tensor) -> Tensor:
        return fast.apply(x).sum()

    expected = hessian(lambda x: whole(x).sum())(x)
    close(jvp(fast.apply, (x,), (x.cos(),)), jvp(whole, (x,), (x.cos(),)))
    close(hessian(ours)(x), expected)
    close(jacrev(grad(ours))(x), expected)
    close(vmap(hessian(ours))(torch.stack([x, x])), torch.stack([expected, expected]))
    assert compiled(fast)


class WithANumber(Function):
    """Under vmap torch hands a number of Python on in place of a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.linalg.cholesky(x @ x.mT + torch.eye(3)).diagonal().log().sum() * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * g * torch.linalg.solve(x @ x.mT + torch.eye(3), x)


def test_19_a_number_in_place_of_a_tensor_is_mapped() -> None:
    fast, xs = fusegrad.compile(WithANumber), plain(2, 3, 3)
    close(vmap(fast.apply)(xs), torch.stack([WithANumber.apply(x) for x in xs]))
    assert compiled(fast)


def test_19_once_differentiable_is_mapped_and_pulled_back() -> None:
    class Once(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 3 * g * x**2

    fast, x = fusegrad.compile(Once), plain(4)
    jacrev(grad(lambda x: fast.apply(x).sin().sum()))(x)
    close(vmap(fast.apply)(x), x**3)
    close(vmap(grad(fast.apply))(x), 3 * x**2)
    assert compiled(fast)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_a_function_pushes_the_tangents_of_what_it_closes_over(backend) -> None:
    x, w, t = torch.tensor([5.0, 7.0]), torch.tensor([2.0, 3.0]), torch.tensor([1.0, -1.0])
    with fwd.dual_level():
        weight = fwd.make_dual(w, t)

        def scaled(x):
            return x * weight

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fusegrad.FallbackWarning)
            pushed = fwd.unpack_dual(fusegrad.compile(scaled, backend=backend)(x)).tangent
    torch.testing.assert_close(pushed, x * t)
