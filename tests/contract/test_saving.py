"""Lines 12 to 14 of docs/contract.md: what forward leaves for backward and jvp, and how autograd watches over it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from side_by_side import accumulated, both, gradients, leaf, outcome, plain, same
from torch.autograd import Function
from torch.func import jvp

import fusegrad

Tensor = torch.Tensor


class Saving(Function):
    """Saves an argument, an output and a value in between."""

    @staticmethod
    def forward(ctx, x, w):
        e = x.exp()
        y = e * w
        ctx.save_for_backward(x, y, e, w)
        return y

    @staticmethod
    def backward(ctx, g):
        x, y, e, w = ctx.saved_tensors
        return g * w * e + 0 * x, g * e + 0 * y


def step(c: Any, x: Any, w: Any) -> Any:
    y = c.apply(x, w)
    return y, gradients(x, w, of=y)


# ------------------------------------------------------------------ 12
@both
@pytest.mark.parametrize(
    "calls",
    [
        lambda ctx, x: (ctx.save_for_backward(x), ctx.save_for_backward(x * 3)),
        lambda ctx, x: ctx.save_for_backward(None, x * 3, None),
        lambda ctx, x: ctx.save_for_backward(x, x),
        lambda ctx, x: ctx.save_for_backward(),
        lambda ctx, x: None,
    ],
    ids=["the last call wins", "None", "twice", "nothing", "no call"],
)
def test_12_what_save_for_backward_takes(calls, backend) -> None:
    class Saves(Function):
        @staticmethod
        def forward(ctx, x):
            calls(ctx, x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            for i, t in enumerate(ctx.saved_tensors):
                g = g if t is None else g * t * (i + 1)
            return g + len(ctx.saved_tensors)

    def story(c: Any) -> Any:
        x = leaf(3)
        y = c.apply(x)
        return y, len(y.grad_fn.saved_tensors), gradients(x, of=y)

    same(Saves, story, backend)


@pytest.mark.parametrize("thing", [5, "text", [1], 2.0])
def test_12_save_for_backward_takes_tensors_alone(thing) -> None:
    class Saves(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, thing)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g

    def story(c: Any) -> Any:
        return c.apply(leaf(3))

    mine, theirs = outcome(story, fusegrad.compile(Saves)), outcome(story, Saves)
    assert type(mine) is type(theirs) and str(mine) == str(theirs)


@both
@pytest.mark.parametrize("what", ["argument", "output", "weight"])
def test_12_a_saved_tensor_that_is_written_is_noticed(what, backend) -> None:
    def story(c: Any) -> Any:
        x, w = leaf(3) * 1, leaf(3) * 1
        y = c.apply(x, w)
        with torch.no_grad():
            {"argument": x, "output": y, "weight": w}[what].mul_(2)
        y.sum().backward()

    same(Saving, story, backend)


@both
def test_12_a_second_backward_raises_unless_the_graph_is_kept(backend) -> None:
    def second(c: Any) -> Any:
        y = c.apply(leaf(3), leaf(3)).sum()
        y.backward()
        y.backward()

    def kept(c: Any) -> Any:
        x, w = leaf(3), leaf(3)
        y = c.apply(x, w).sum()
        for _ in range(3):
            y.backward(retain_graph=True)
        return accumulated(x, w)

    def looked_at(c: Any) -> Any:
        y = c.apply(leaf(3), leaf(3))
        y.sum().backward()
        return y.grad_fn.saved_tensors

    same(Saving, second, backend)
    same(Saving, kept, backend)
    same(Saving, looked_at, backend)


@both
def test_12_hooks_pack_each_saved_tensor_once_and_unpack_it_at_each_access(backend) -> None:
    def story(c: Any) -> Any:
        seen: list[Any] = []

        def pack(t: Tensor) -> Any:
            seen.append(("pack", tuple(t.shape), t.requires_grad))
            return t.detach().clone(), len(seen)

        def unpack(packed: Any) -> Tensor:
            seen.append(("unpack", packed[1]))
            return packed[0]

        x, w = leaf(3), leaf(3, seed=1)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = c.apply(x, w)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        return seen, accumulated(x, w)

    same(Saving, story, backend)


@both
def test_12_nested_hooks_and_save_on_cpu(backend) -> None:
    def story(c: Any) -> Any:
        x, w = leaf(3), leaf(3, seed=1)
        with torch.autograd.graph.save_on_cpu():
            y = c.apply(x, w)
        first = gradients(x, w, of=y)
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2),
            torch.autograd.graph.saved_tensors_hooks(lambda t: t + 1, lambda t: t - 1),
        ):
            y = c.apply(x, w)
        return first, gradients(x, w, of=y)

    same(Saving, story, backend)


def test_12_hooks_that_are_forbidden_raise() -> None:
    def story(c: Any) -> Any:
        with (
            torch.autograd.graph.disable_saved_tensors_hooks("not here"),
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        ):
            return c.apply(leaf(3), leaf(3))

    same(Saving, story)


@pytest.mark.parametrize("reentrant", [True, False])
def test_12_checkpoint_runs_forward_again(reentrant) -> None:
    def story(c: Any) -> Any:
        x, w = leaf(3), leaf(3)
        torch.utils.checkpoint.checkpoint(c.apply, x, w, use_reentrant=reentrant).pow(2).sum().backward()
        return accumulated(x, w)

    same(Saving, story)


@both
def test_12_saved_tensors_on_grad_fn_are_what_the_user_saved(backend) -> None:
    def story(c: Any) -> Any:
        x, w = leaf(3), leaf(3)
        y = c.apply(x, w)
        saved = y.grad_fn.saved_tensors
        return len(saved), saved[0] is x, saved[3] is w, [t.detach() for t in saved]

    same(Saving, story, backend)


def test_12_memory_of_saved_tensors_is_let_go_after_backward() -> None:
    def story(c: Any) -> Any:
        y = c.apply(leaf(3), leaf(3))
        y.sum().backward()
        return type(outcome(lambda n: n.saved_tensors, y.grad_fn)).__name__

    same(Saving, story)


# ------------------------------------------------------------------ 13
class Forward(Function):
    @staticmethod
    def forward(x, k):
        return x * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(inputs[0] if inputs[1] > 0 else None, output)
        ctx.save_for_backward(output)
        ctx.k, ctx.both, ctx.items = inputs[1], (inputs[0], 2), [output]

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y * 10, None

    @staticmethod
    def jvp(ctx, t, _):
        x, y = ctx.saved_tensors
        return t * (1 if x is None else x) * ctx.k * ctx.both[1] + y + ctx.items[0]


@both
@pytest.mark.parametrize("k", [2.0, -2.0])
def test_13_save_for_forward_is_what_jvp_sees(k, backend) -> None:
    same(Forward, lambda c: jvp(lambda x: c.apply(x, k), (plain(3),), (plain(3, seed=1),)), backend, flags=False)

    def reverse(c: Any) -> Any:
        x = leaf(3)
        y = c.apply(x, k)
        return y, gradients(x, of=y)

    same(Forward, reverse, backend)


@both
def test_13_ctx_attributes_of_every_kind(backend) -> None:
    class Attributes(Function):
        @staticmethod
        def forward(ctx, x, k):
            ctx.shape, ctx.rows, ctx.nested = x.shape, x.shape[0], {"sizes": [x.shape[0] * 2, {"d": x.dim()}]}
            ctx.k, ctx.dtype, ctx.text, ctx.rule = k, x.dtype, "mine", torch.sin
            ctx.mask, ctx.twice, ctx.x, ctx.window = x > 0, x * 2, x, slice(0, 2)
            ctx.gone = 5
            del ctx.gone
            return (x * k).sum(0)

        @staticmethod
        def backward(ctx, g):
            assert ctx.text == "mine" and ctx.nested["sizes"][1]["d"] == 2 and not hasattr(ctx, "gone")
            wide = g.expand(ctx.shape) * ctx.mask * ctx.k + ctx.twice * ctx.rows / ctx.nested["sizes"][0]
            return ctx.rule(wide).to(ctx.dtype) + ctx.x[ctx.window].sum(), None

    def story(c: Any) -> Any:
        seen = []
        for shape in ((3, 4), (5, 2), (2, 4), (3, 4)):
            x = leaf(*shape)
            y = c.apply(x, 2.0)
            seen.append((y, gradients(x, of=y)))
        return seen

    same(Attributes, story, backend)


def test_13_a_method_reads_what_torch_puts_on_ctx() -> None:
    class Reads(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.kept = ctx.to_save
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * len(ctx.kept) * len(ctx.saved_variables)

    def story(c: Any) -> Any:
        x = leaf(3)
        return gradients(x, of=c.apply(x))

    same(Reads, story)


@both
def test_13_backward_may_leave_something_for_its_next_run(backend) -> None:
    """What backward puts on ctx is seen by the next backward of the same node: such a backward is the user's own."""

    class Leaves(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.runs = 0
            return x * 2

        @staticmethod
        def backward(ctx, g):
            ctx.runs += 1
            return g * ctx.runs

    def story(c: Any) -> Any:
        x = leaf(3)
        y = c.apply(x).sum()
        for _ in range(3):
            y.backward(retain_graph=True)
        return accumulated(x)

    same(Leaves, story, backend, opaque=["backward"])


def count_up(ctx: Any) -> None:
    ctx.runs += 1
    ctx.seen.append(ctx.runs)


@both
def test_13_backward_may_leave_something_by_way_of_a_function(backend) -> None:
    class Leaves(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.runs, ctx.seen = 0, []
            return x * 2

        @staticmethod
        def backward(ctx, g):
            count_up(ctx)
            return g * ctx.runs * len(ctx.seen)

    def story(c: Any) -> Any:
        x = leaf(3)
        y, other = c.apply(x).sum(), c.apply(x).sum()
        for _ in range(3):
            y.backward(retain_graph=True)
        other.backward()
        return accumulated(x)

    same(Leaves, story, backend, opaque=["backward"])


@pytest.mark.parametrize(
    "make",
    [lambda: torch.Generator().manual_seed(2), lambda: iter((2.0, 3.0)), lambda: itertools.count(1)],
    ids=["generator", "iterator", "count"],
)
def test_13_what_forward_makes_anew_for_ctx(make) -> None:
    """Each call has its own: none is kept from the capture."""

    class Keeps(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.made = {"inside": make()}
            return x * 1.0

        @staticmethod
        def backward(ctx, g):
            made = ctx.made["inside"]
            factor = torch.rand(g.shape, generator=made) if isinstance(made, torch.Generator) else next(made)
            return g * factor

    def story(c: Any) -> Any:
        x = leaf(3)
        return [gradients(x, of=c.apply(x)) for _ in range(4)]

    same(Keeps, story, opaque=("forward", "backward"))


# ------------------------------------------------------------------ 14
class Asks(Function):
    @staticmethod
    def forward(a, b, k):
        return a * b

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.needs = ctx.needs_input_grad
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, g):
        assert ctx.needs == ctx.needs_input_grad and len(ctx.needs) == 3
        a, b = ctx.saved_tensors
        return g * b * 2 if ctx.needs_input_grad[0] else None, g * a if ctx.needs[1] else None, None


@both
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (False, False)])
def test_14_needs_input_grad_is_requires_grad_at_forward_time(needs, backend) -> None:
    def story(c: Any) -> Any:
        a, b = (leaf(3, seed=i).detach().requires_grad_(n) for i, n in enumerate(needs))
        y = c.apply(a, b, 1)
        if any(needs):
            y.sum().backward()
        return y, accumulated(a, b), y.requires_grad and y.grad_fn.needs_input_grad

    same(Asks, story, backend)


def test_14_needs_input_grad_under_no_grad() -> None:
    class Shows(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2, [ctx.needs_input_grad, x.requires_grad, torch.is_grad_enabled()]

        @staticmethod
        def backward(ctx, g, _):
            return g

    def story(c: Any) -> Any:
        with torch.no_grad():
            quiet = c.apply(leaf(3))
        with torch.inference_mode():
            inferred = c.apply(leaf(3))[1]
        return quiet, inferred, c.apply(leaf(3)), c.apply(leaf(3).detach())

    same(Shows, story)
