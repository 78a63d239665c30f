"""The gradient of a plain function that draws random numbers belongs to the numbers of its result."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import Function

import fusegrad
from fusegrad import explain

Tensor = torch.Tensor


def scaled(x: Tensor) -> Tensor:
    return x * torch.rand(())


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) * 2


def noisy(x: Tensor) -> Tensor:
    return x * torch.empty_like(x).normal_()


class Dropped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = (torch.rand_like(x) > 0.5) * 2.0
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return g * mask


def calling(x: Tensor) -> Tensor:
    return Dropped.apply(x * 3)


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
@pytest.mark.parametrize("fn", [scaled, dropped, noisy, calling])
def test_gradients_belong_to_the_result(fn: Callable[[Tensor], Tensor]) -> None:
    fast = fusegrad.compile(fn, backend="reference")
    for again in range(2):
        found = []
        for call in (fast, fn):
            x = torch.linspace(1, 2, 16).requires_grad_()
            torch.manual_seed(again)
            y = call(x)
            (g,) = torch.autograd.grad(y.sum(), x)
            torch.testing.assert_close(g * x, y)  # each is linear
            found += [y.detach()]
        assert torch.equal(*found)
    assert "draws random numbers" in str(explain(fast, torch.ones(16)))


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_forward_mode_and_vjp_too() -> None:
    x = torch.linspace(1, 2, 16)
    fast = fusegrad.compile(dropped, backend="reference")
    y, t = torch.func.jvp(fast, (x,), (x,))
    torch.testing.assert_close(t, y)
    y, pull = torch.func.vjp(fast, x)
    torch.testing.assert_close(pull(torch.ones(16))[0] * x, y)


def test_a_class_that_saves_its_mask_is_compiled() -> None:
    fast = fusegrad.compile(Dropped, backend="reference")
    x = torch.linspace(1, 2, 16).requires_grad_()
    y = fast.apply(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0] * x, y)
    assert "in eager" not in str(explain(fast, torch.ones(16)))


# ------------------------------------------------------------------ generators
FOUND = torch.Generator()


def made(x: Tensor, seed: int) -> Tensor:
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))


def found(x: Tensor, seed: int) -> Tensor:
    return torch.rand(x.shape, generator=FOUND)


def in_place(x: Tensor, seed: int) -> Tensor:
    return torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(seed))


def order(x: Tensor, seed: int) -> Tensor:
    return x[torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(seed))]


def compiled_draw(x: Tensor, seed: int) -> Tensor:
    return torch.ops.aten.rand.generator(list(x.shape), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3)])
@pytest.mark.parametrize("draw", [made, found, in_place, order, compiled_draw])
def test_a_generator_is_drawn_from_at_every_call(draw: Any, shape: Any, dynamic: bool) -> None:
    class Noise(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, seed: int) -> Tensor:
            ctx.seed = seed
            return x * draw(x, seed)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
            return g * draw(g, ctx.seed), None

    def story(cls: Any) -> list[Any]:
        FOUND.manual_seed(7)
        results = []
        for seed in (3, 3, 4, 3):
            x = torch.ones(shape, requires_grad=True)
            y = cls.apply(x, seed)
            y.sum().backward()
            results.append([y.tolist(), x.grad.tolist()])
        return results

    fast = fusegrad.compile(Noise, dynamic=dynamic)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        assert story(fast) == story(Noise)


class Rounded(Function):
    """A generator that nobody gave: torch's own, of sizes that may be symbols."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, generator: Any = None) -> Tensor:
        return (x + torch.rand(x.shape, generator=generator)).floor()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * torch.randn(g.shape, generator=None), None


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_no_generator_is_torchs(backend: str) -> None:
    fast = fusegrad.compile(Rounded, backend=backend)
    for size in (5, 6, 7, 5):
        told = []
        for cls in (fast, Rounded):
            torch.manual_seed(size)
            x = torch.linspace(-2, 2, size).requires_grad_()
            y = cls.apply(x)
            told.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
        assert all(map(torch.equal, *told))
    records = fast._fusegrad.ledger.records
    assert [records[m].status for m in ("forward", "backward")] == ["compiled"] * 2
    assert not fast._fusegrad.ledger.opaque_calls


class Noised(Function):
    """Its gradient has noise, drawn at every backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * torch.rand_like(g)


class NoisedTwice(Function):
    """The derivative of its backward draws, whether backward itself does or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, draws: bool) -> Tensor:
        ctx.draws = draws
        return x * 3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return Noised.apply(g) * (torch.rand_like(g) if ctx.draws else 2), None


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_a_derivative_that_draws_draws_anew(backend: str, draws: bool) -> None:
    told = []
    for cls in (NoisedTwice, fusegrad.compile(NoisedTwice, backend=backend)):
        torch.manual_seed(1)
        x, g = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fusegrad.FallbackWarning)
            (first,) = torch.autograd.grad(cls.apply(x, draws), x, g, create_graph=True)
            values = [first.detach(), torch.rand(1)]
            values += [torch.autograd.grad(first, g, torch.ones(4), retain_graph=True)[0] for _ in range(3)]
        told.append([*values, torch.rand(1)])
    assert all(map(torch.allclose, *told))
    assert not torch.equal(told[1][2], told[1][3])


class Blurred(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float) -> Tensor:
        return x - low + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


class BlurredFromItsLeast(Function):
    """The stochastic rounding of gradients: a number of the gradient, then another Function that draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Blurred.apply(x, float(x.min()))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return Blurred.apply(g, float(g.min()))


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_a_function_that_draws_is_in_the_graph_of_a_method_that_asks_for_a_number(backend: str) -> None:
    told, fast = [], fusegrad.compile(BlurredFromItsLeast, backend=backend)
    for cls in (BlurredFromItsLeast, fast):
        torch.manual_seed(1)
        x = torch.linspace(-1, 2, 5, requires_grad=True)
        values = []
        for step in range(3):
            y = cls.apply(x)
            values += [y.detach(), *torch.autograd.grad(y, x, torch.linspace(1, 2, 5) + step)]
        told.append([*values, torch.rand(1)])
    assert all(map(torch.equal, *told))
    assert {method: record.status for method, record in fast._fusegrad.ledger.records.items()} == dict.fromkeys(
        ("forward", "backward"), "compiled"
    )
