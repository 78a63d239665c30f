"""Results in somebody else's graph: memory that they share, random numbers, kept values, dtypes under autocast."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function

import fusegrad

SHARED = {
    "a view of an argument": lambda x: (x[0], x * 2),
    "an argument": lambda x: (x, x * 2),
    "an argument's memory": lambda x: (x.detach(), x * 2),
    "a part of another result": lambda x: (lambda v: (v[0], v))(x * 2),
    "two parts of what is not returned": lambda x: (lambda v: (v[0], v[1]))(x * 2),
    "one result twice": lambda x: (lambda v: (v, v))(x * 2),
}


@pytest.fixture(autouse=True)
def begin_again():
    torch._dynamo.reset()


def compiled(f):
    return torch.compile(f, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_results_that_share_memory_have_gradients_of_their_own(name: str, beside: bool) -> None:
    """torch 2.13 makes views that a graph returns anew behind it, where a Function's own gradient is lost."""

    class Shares(Function):
        @staticmethod
        def forward(ctx, x):
            return SHARED[name](x)

        @staticmethod
        def backward(ctx, first, second):
            return first.sum() * 3 + second.sum() * 5 + torch.zeros(3, 4)

    fast = fusegrad.compile(Shares)

    def calls(cls):
        def f(x):
            y = x * 2
            results = cls.apply(y)
            return (*results, y) if beside else results

        return f

    found = []
    for f in (calls(Shares), compiled(calls(fast))):
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        results = f(x)
        weights = [torch.full_like(r, i + 1.0) for i, r in enumerate(results)]
        found.append((*(r.detach() for r in results), *torch.autograd.grad(results, x, weights)))
    torch.testing.assert_close(found[1], found[0])


def test_without_a_gradient_they_share_it_in_a_graph_too() -> None:
    @fusegrad.compile
    class Halves(Function):
        @staticmethod
        def forward(ctx, x):
            whole = x * 2
            return whole, whole[0]

        @staticmethod
        def backward(ctx, g, _):
            return g

    def f(x):
        whole, part = Halves.apply(x)
        part.add_(1)
        return whole

    x = torch.ones(2, 3)
    torch.testing.assert_close(compiled(f)(x), f(x))


class Drops(Function):
    """A slope of 3 times what it returns, so that a derivative of forward is noticed."""

    @staticmethod
    def forward(ctx, x, p):
        mask = (torch.rand_like(x) > p).to(x.dtype) / (1 - p)
        kept = x * mask
        ctx.save_for_backward(kept)
        return torch.relu(kept)

    @staticmethod
    def backward(ctx, g):
        (kept,) = ctx.saved_tensors
        return g * kept * 3, None


def drops() -> type:
    return fusegrad.compile(type("Drops", (Drops,), {}))


def test_each_call_draws_its_own_numbers_and_its_backward_knows_them() -> None:
    """Passes of torch that merge equal calls know its own random operations alone."""
    fast, x = drops(), torch.ones(64, requires_grad=True)
    first, second = compiled(lambda x: (fast.apply(x, 0.5), fast.apply(x, 0.5)))(x)
    assert not torch.equal(first, second)
    for y in (first, second):
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], y.detach() * 3)


def test_a_program_that_draws_is_differentiated_by_its_backward_and_not_transformed() -> None:
    fast = drops()

    class Layer(torch.nn.Module):
        def forward(self, x):
            return fast.apply(x, 0.5)

    program = torch.export.export(Layer(), (torch.ones(64),)).module()
    x = torch.ones(64, requires_grad=True)
    y = program(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], y.detach() * 3)
    with pytest.raises(NotImplementedError, match=r"cannot be transformed within a graph: it draws random numbers"):
        torch.func.grad(lambda x: program(x).sum())(x.detach())


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_a_plain_function_that_draws_is_followed_by_torch() -> None:
    fast = fusegrad.compile(lambda x: torch.nn.functional.dropout(x, 0.5) * x)
    x = torch.rand(64).add(1).requires_grad_()
    first, second = compiled(lambda x: (fast(x), fast(x)))(x)
    assert not torch.equal(first, second)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], 2 * first.detach() / x.detach())
    assert "draws random numbers" in str(fusegrad.explain(fast, x))


class Scales(Function):
    """Writes to an argument, and keeps what is no argument and no result."""

    @staticmethod
    def forward(ctx, x, y):
        t = x.exp()
        y.mul_(t)
        ctx.mark_dirty(y)
        ctx.save_for_backward(t)
        return y

    @staticmethod
    def backward(ctx, g):
        (t,) = ctx.saved_tensors
        return g * t * 7, g * t


def test_a_written_argument_and_a_value_in_between() -> None:
    fast = fusegrad.compile(type("Scales", (Scales,), {}))
    x = torch.linspace(-1, 1, 5).requires_grad_()

    def f(cls):
        def call(x):
            y = torch.ones(5)
            return cls.apply(x * 1, y).sum() + 2 * y.sum()

        return call

    torch.testing.assert_close(torch.autograd.grad(compiled(f(fast))(x), x), torch.autograd.grad(f(Scales)(x), x))


def test_the_transform_of_a_written_argument() -> None:
    class Negates(Function):
        @staticmethod
        def forward(x):
            return x.neg_()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.mark_dirty(inputs[0])

        @staticmethod
        def backward(ctx, g):
            return g * 5

    fast, x = fusegrad.compile(Negates), torch.rand(5)
    found = compiled(lambda x: torch.func.grad(lambda x: fast.apply(x * 1).sum())(x))(x)
    torch.testing.assert_close(found, torch.full((5,), 5.0))


@pytest.mark.parametrize("graph", [False, True])
def test_a_returned_argument_that_is_marked_has_no_gradient(graph: bool) -> None:
    class Passes(Function):
        @staticmethod
        def forward(x, y):
            return x * 2, y

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.mark_non_differentiable(output[1])

        @staticmethod
        def backward(ctx, g, h):
            return g * 3, torch.zeros_like(g) if h is None else h * 5

    fast, x, y = fusegrad.compile(Passes), torch.rand(3), torch.rand(3)

    def slopes(cls):
        def loss(x, y):
            first, second = cls.apply(x * 1, y * 1)
            return first.sum() + 7 * second.sum()

        return lambda x, y: torch.func.grad(loss, argnums=(0, 1))(x, y)

    found = compiled(slopes(fast))(x, y) if graph else slopes(fast)(x, y)
    torch.testing.assert_close(found, slopes(Passes)(x, y))
    moving = [t.clone().requires_grad_() for t in (x, y)]
    second = (compiled(lambda *xs: fast.apply(*xs)) if graph else fast.apply)(*moving)[1]
    assert not second.requires_grad


def test_autocast_around_a_call_is_part_of_the_graph() -> None:
    """The graph is made under autocast and runs without it: so does the comparison with the user's own method."""

    class Product(Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return torch.tanh(x @ w)

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return (g.float() @ w.t()) * 3, x.t() @ g.float()

    fast = fusegrad.compile(Product)

    def loss(cls):
        def f(x, w):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return cls.apply(x, w)

        return f

    found = []
    for f in (loss(Product), compiled(loss(fast))):
        x, w = (torch.randn(5, 5, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (0, 1))
        y = f(x, w)
        found.append((y.detach(), *torch.autograd.grad(y.float().sum(), (x, w))))
    assert found[1][0].dtype == torch.bfloat16
    torch.testing.assert_close(found[1], found[0])
