"""Lines 15 to 18 of docs/contract.md: what comes into backward and jvp, and what they may return."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from side_by_side import accumulated, both, leaf, outcome, plain, same
from torch.autograd import Function
from torch.func import grad, jvp

import fusegrad

Tensor = torch.Tensor


def by(backward: Any, forward: Any = None) -> Any:
    """A class of one argument with this backward."""

    class Made(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2 if forward is None else forward(x)

    Made.backward = staticmethod(backward)
    return Made


def story(c: Any) -> Any:
    x = leaf(3)
    y = c.apply(x)
    y.sum().backward()
    return y, accumulated(x)


# ------------------------------------------------------------------ 15
def two_outputs(materialize: bool) -> Any:
    class Two(Function):
        @staticmethod
        def forward(x, w):
            return x * 2, w * 3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.set_materialize_grads(materialize)

        @staticmethod
        def backward(ctx, g, h):
            given = [t is not None for t in (g, h)]
            return 100 * g if given[0] else None, (7 * h if given[1] else None) if given != [True, True] else h * 5

        @staticmethod
        def jvp(ctx, t, s):
            return None if t is None else t * 10, None if s is None else s * 20

    return Two


@both
@pytest.mark.parametrize("materialize", [True, False])
def test_15_undefined_gradients(materialize, backend) -> None:
    def used(c: Any) -> Any:
        seen = []
        for which in ((0,), (1,), (0, 1)):
            x, w = leaf(3), leaf(3, seed=1)
            outputs = c.apply(x, w)
            sum(outputs[i].sum() for i in which).backward()
            seen.append(accumulated(x, w))
        return seen

    same(two_outputs(materialize), used, backend)


class MarkedOnes(Function):
    """Gradients of outputs that never move come as None, those of others as zeros."""

    @staticmethod
    def forward(x):
        return x * 2, x + 1, x > 0, x * 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx._materialize_non_diff_grads = False

    @staticmethod
    def backward(ctx, *gradients):
        there = [g is not None for g in gradients]
        return gradients[0] * (3.0 if there == [True, False, False, True] else 5.0) + 7 * gradients[3]


@both
def test_15_gradients_that_are_made_for_moving_outputs_alone(backend) -> None:
    def used(c: Any) -> Any:
        seen = []
        for _ in range(12):  # until the node is written out
            x = leaf(3)
            c.apply(x)[0].sum().backward()
            seen += accumulated(x)
        return [*seen, grad(lambda t: c.apply(t)[0].sum())(plain(3))]

    same(MarkedOnes, used, backend)


@pytest.mark.parametrize("materialize", [True, False])
def test_15_undefined_tangents(materialize) -> None:
    x, w = plain(3), plain(3, seed=1)

    def tangents(c: Any) -> Any:
        return (
            jvp(lambda x: c.apply(x, w), (x,), (x,)),
            jvp(lambda w: c.apply(x, w), (w,), (w,)),
            jvp(c.apply, (x, w), (x, w)),
        )

    same(two_outputs(materialize), tangents, flags=False)


# ------------------------------------------------------------------ 16
RETURNS: dict[str, Any] = {
    "extra Nones": lambda g: (g, None, None, None),
    "too few": lambda g: g,
    "too many": lambda g: (g, None, g),
    "an empty tuple": lambda g: (),
    "for a number": lambda g: (g, g),
    "another shape": lambda g: (g.new_ones(5), None),
    "broadcast": lambda g: (g.expand(4, 3), None),
    "one element": lambda g: (g.sum(), None),
    "wider": lambda g: (g.double(), None),
    "narrower": lambda g: (g.half(), None),
    "complex": lambda g: (g + 1j, None),
    "integers": lambda g: (g.long(), None),
    "a number": lambda g: (3.0, None),
    "a list": lambda g: [g, None],
    "a string": lambda g: ("text", None),
    "nothing": lambda g: (None, None),
    "None alone": lambda g: None,
}


@both
@pytest.mark.parametrize("kind", RETURNS)
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_16_what_backward_may_return(kind, backend) -> None:
    make = RETURNS[kind]

    class Returns(Function):
        @staticmethod
        def forward(ctx, x, k):
            return x * k

        @staticmethod
        def backward(ctx, g):
            return make(g)

    def told(c: Any) -> Any:
        x = leaf(3)
        c.apply(x, 2).sum().backward()
        return accumulated(x)

    fast, theirs = fusegrad.compile(Returns, backend=backend), outcome(told, Returns)
    for _ in range(2):
        mine = outcome(told, fast)
        if isinstance(theirs, Exception):
            assert isinstance(mine, type(theirs)) and str(mine).partition(" [FG216]")[0].startswith(str(theirs))
        else:
            assert [None if t is None else (t.dtype, t.tolist()) for t in mine] == [
                None if t is None else (t.dtype, t.tolist()) for t in theirs
            ]


@both
def test_16_gradients_are_summed_to_the_shape_and_cast_to_the_type(backend) -> None:
    class Broadcast(Function):
        @staticmethod
        def forward(ctx, x, b):
            return x * b

        @staticmethod
        def backward(ctx, g):
            return g.double() * 2, g.double() * 3

    def told(c: Any) -> Any:
        x, b = leaf(4, 3), leaf(3).detach().to(torch.bfloat16).requires_grad_()
        y = c.apply(x, b)
        y.sum().backward()
        return y, accumulated(x, b)

    same(Broadcast, told, backend)


HANDED: dict[str, Any] = {
    "in place": lambda ctx, g: g.mul_(3),
    "in place on a copy": lambda ctx, g: g.clone().mul_(3),
    "as it came": lambda ctx, g: g,
    "a view of it": lambda ctx, g: g.view(-1).view(3),
    "saved": lambda ctx, g: ctx.saved_tensors[0],
    "a view of what is saved": lambda ctx, g: ctx.saved_tensors[0].flip(0).flip(0).view(3),
    "expanded": lambda ctx, g: g.sum().expand(3),
}


@both
@pytest.mark.parametrize("kind", HANDED)
def test_16_gradients_handed_on_and_changed(kind, backend) -> None:
    def told(c: Any) -> Any:
        x = leaf(3)
        y = c.apply(x)
        g = torch.full((3,), 2.0)
        first = torch.autograd.grad(y, x, g, retain_graph=True)[0].clone()
        (again,) = torch.autograd.grad(y, x, g)
        return first.detach(), again.detach(), g

    same(by(HANDED[kind]), told, backend)


@both
def test_16_one_tensor_for_two_arguments(backend) -> None:
    class Shared(Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, g):
            both_of_them = g * 3
            return both_of_them, both_of_them

    def told(c: Any) -> Any:
        x, y = leaf(3), leaf(3)
        for _ in range(2):
            c.apply(x, y).sum().backward()
        x.grad.add_(1)
        return accumulated(x, y)

    same(Shared, told, backend)


@both
def test_16_gradients_accumulate_over_calls(backend) -> None:
    def told(c: Any) -> Any:
        x = leaf(3)
        for k in (1.0, 2.0, 3.0):
            (c.apply(x) * k).sum().backward()
        (c.apply(x) + c.apply(c.apply(x))).sum().backward()
        return accumulated(x)

    same(by(lambda ctx, g: g * ctx.saved_tensors[0]), told, backend)


def test_16_a_gradient_for_an_argument_that_needs_none_is_dropped() -> None:
    class Both(Function):
        @staticmethod
        def forward(ctx, x, y):
            return x * y

        @staticmethod
        def backward(ctx, g):
            return g * 2, g.new_ones(7)

    def told(c: Any) -> Any:
        x, y = leaf(3), leaf(3).detach()
        c.apply(x, y).sum().backward()
        return accumulated(x, y)

    same(Both, told)


def test_16_hooks_see_what_eager_shows_them() -> None:
    def told(c: Any) -> Any:
        x, seen = leaf(3), []
        y = c.apply(x)
        x.register_hook(lambda g: seen.append(("leaf", g.clone())))
        x.register_post_accumulate_grad_hook(lambda t: seen.append(("post", t.grad.clone())))
        y.register_hook(lambda g: g * 2)
        y.retain_grad()
        y.grad_fn.register_hook(lambda gi, go: seen.append(("node", [*gi, *go])))
        y.grad_fn.register_prehook(lambda go: (go[0] * 5,))
        y.pow(2).sum().backward()
        return seen, y.grad, accumulated(x)

    same(by(lambda ctx, g: g * ctx.saved_tensors[0]), told)


def test_16_a_backward_in_other_threads() -> None:
    def told(c: Any) -> Any:
        results: dict[int, Any] = {}

        def work(i: int) -> None:
            x = leaf(3, seed=i)
            for _ in range(3):
                c.apply(x).sum().backward()
            results[i] = x.grad

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return [results[i] for i in range(4)]

    same(by(lambda ctx, g: g * ctx.saved_tensors[0]), told)


def test_16_anomaly_mode_names_the_line() -> None:
    def told(c: Any) -> Any:
        with torch.autograd.detect_anomaly():
            c.apply(leaf(3)).sum().backward()

    with pytest.warns(UserWarning):
        mine, theirs = (
            outcome(told, fusegrad.compile(by(lambda ctx, g: g / 0 * 0))),
            outcome(told, by(lambda ctx, g: g / 0 * 0)),
        )
    assert type(mine) is type(theirs) is RuntimeError and str(mine) == str(theirs)


# ------------------------------------------------------------------ 17
def test_17_grad_modes_inside_the_methods() -> None:
    def told(c: Any) -> Any:
        seen = []
        for create in (False, True):
            x = leaf(3)
            y, in_forward = c.apply(x)
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=create)
            seen.append((in_forward, g.detach(), g.requires_grad))
        return seen

    class Modes(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2, [torch.is_grad_enabled(), x.requires_grad, (x * 2).requires_grad]

        @staticmethod
        def backward(ctx, g, _):
            (x,) = ctx.saved_tensors
            return g * x * (3 if torch.is_grad_enabled() else 5)

    same(Modes, told, opaque=["backward"])


@both
def test_17_double_and_triple_backward(backend) -> None:
    def told(c: Any) -> Any:
        x = leaf(3)
        orders = []
        y = c.apply(x).sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            orders.append(g.detach())
            y = g.pow(2).sum()
        return orders

    same(by(lambda ctx, g: g * ctx.saved_tensors[0] ** 3 * 10), told, backend, tolerance=1e-5)


def test_17_double_backward_through_the_gradient_alone() -> None:
    def told(c: Any) -> Any:
        x, v = leaf(3), leaf(3, seed=1)
        (g,) = torch.autograd.grad(c.apply(x), x, v, create_graph=True)
        return torch.autograd.grad(g.sum(), (x, v))

    same(by(lambda ctx, g: g * ctx.saved_tensors[0] * 10), told)


def test_17_no_grad_enable_grad_and_detach_inside_backward() -> None:
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            quiet = g * x
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (inner,) = torch.autograd.grad((leaf**3).sum(), leaf)
        return quiet + inner * g + g.detach()

    def told(c: Any) -> Any:
        x = leaf(3)
        (g,) = torch.autograd.grad(c.apply(x).sum(), x, create_graph=True)
        return g.detach()

    same(by(backward), told, tolerance=1e-6)


# ------------------------------------------------------------------ 18
@pytest.mark.parametrize(
    "rule",
    [lambda t: t, lambda t: (t, t, t), lambda t: (), lambda t: (t, None), lambda t: (None, t), lambda t: (t * 2, t)],
    ids=["one", "three", "none", "first", "second", "two"],
)
def test_18_jvp_returns_one_tangent_for_each_output(rule) -> None:
    class Two(Function):
        @staticmethod
        def forward(x):
            return x * 2, x * 3

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def jvp(ctx, t):
            return rule(t)

    same(Two, lambda c: jvp(c.apply, (plain(3),), (plain(3),)), flags=False)


def test_18_jvp_of_outputs_that_are_no_tensors() -> None:
    class Objects(Function):
        @staticmethod
        def forward(x):
            return 5, x * 3, "text"

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def jvp(ctx, t):
            return None, t * 30, None

    same(Objects, lambda c: jvp(lambda x: c.apply(x)[1], (plain(3),), (plain(3),)), flags=False)


class Contracts(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g @ b.mT, a.mT @ g


class Sums(Function):
    @staticmethod
    def forward(ctx, x, b):
        return x + b

    @staticmethod
    def backward(ctx, g):
        return g - g.sum(-1, keepdim=True), (g.T.softmax(0).T + g.cumsum(0)).sum(0)


LAID_OUT: dict[str, Any] = {
    "steps": lambda n, m: torch.randn(2 * n, 2 * m)[::2, ::2],
    "a part": lambda n, m: torch.randn(2 * n, 2 * m)[:n, 1 : m + 1],
    "a part, transposed": lambda n, m: torch.randn(2 * m, 2 * n)[:m, :n].t(),
    "expanded over steps": lambda n, m: torch.randn(n, 2 * m)[:, :1].expand(n, m),
}


@pytest.mark.parametrize("layout", LAID_OUT)
@pytest.mark.parametrize(("cls", "shapes"), [(Contracts, [(33, 21), (21, 17)]), (Sums, [(33, 21), (21,)])])
def test_14_torchs_operations_add_in_eagers_order_along_gradients_with_gaps(cls, shapes, layout) -> None:
    fast, xs = fusegrad.compile(cls, backend="reference"), [torch.randn(s, requires_grad=True) for s in shapes]
    for _ in range(2):
        g = LAID_OUT[layout](*cls.apply(*xs).shape)
        mine, theirs = (torch.autograd.grad(c.apply(*xs), xs, g) for c in (fast, cls))
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(mine, theirs, strict=True))
    assert fast._fusegrad.ledger.records["backward"].status == "compiled"


class AsksInBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * 2 if g.sum() > 0 else g * torch.from_numpy(g.detach().numpy())


def test_17_no_graph_hangs_on_a_second_gradient_that_is_not_to_be_differentiated():
    class Calls(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return AsksInBackward.apply(x) * g * x

    def story(cls: Any) -> Any:
        x, w = leaf(3), leaf(3, seed=1)
        (g,) = torch.autograd.grad(cls.apply(x), x, w, create_graph=True)
        second = torch.autograd.grad(g.sum(), [x, w])
        return second, [(s.requires_grad, s.grad_fn is None) for s in second]

    same(Calls, lambda cls: [story(cls) for _ in range(3)], may=("torch.func", "backward"))
