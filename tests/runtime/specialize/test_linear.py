"""Which backwards are transposed for forward mode: judged by the captured graph, else by a trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.func import jvp

import fusegrad
from fusegrad.runtime.specialize.linearity import NonLinearBackward, sums

Backward = Callable[[torch.Tensor, torch.Tensor], Any]


def function_of(change: Backward) -> type:
    class Changed(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return change(g, x)

    return Changed


def tangent(change: Backward, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return jvp(fusegrad.compile(function_of(change)).apply, (x,), (t,))[1]


def clipped(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    norm = g.norm()
    return g / torch.clamp(norm, min=1.0)


REFUSED: dict[str, tuple[Backward, str]] = {
    "a constant added": (lambda g, x: g + x, "`add` adds a term that does not depend on it"),
    "a constant alone": (lambda g, x: x.sin(), "`sin` gives a result that does not depend on it"),
    "ones where masked": (lambda g, x: g.masked_fill(x > 0, 1.0), "`masked_fill` adds a term"),
    "norm clipping": (clipped, "`linalg_vector_norm` multiplies it by itself"),
    "clamp": (lambda g, x: g.clamp(-9, 9), "`clamp` is not linear"),
    "its sign": (lambda g, x: x * (g > 0), "`gt` is not linear"),
    "rounding": (lambda g, x: g.to(torch.int32).to(g.dtype), "`_to_copy` is not linear"),
    "a library call": (lambda g, x: g.cummax(0)[0], "`cummax` is not linear"),
    "kink behind a library call": (lambda g, x: F.pad(g.cumprod(0), (1, -1)).clamp(-9e9, 9e9), "`clamp` is not linear"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_not_linear_is_refused_with_its_line(how: str) -> None:
    change, why = REFUSED[how]
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    with pytest.raises(NonLinearBackward) as raised:
        tangent(change, x, torch.ones(2, 3))
    assert why in str(raised.value) and f"at:   {__file__}:" in str(raised.value)
    line = str(raised.value).split(f"{__file__}:")[1].split(":")[0].split()[0]
    assert abs(int(line) - change.__code__.co_firstlineno) <= 2


LINEAR: dict[str, Backward] = {
    "scaled": lambda g, x: g * x.cos(),
    "detached": lambda g, x: (g * 3).detach(),
    "a mask": lambda g, x: torch.where(x > 0, g, 0.0),
    "zero times a residual": lambda g, x: g + 0 * x,
    "zeros and an index": lambda g, x: torch.zeros_like(g).index_add(0, torch.tensor([1, 0]), g),
    "half and back": lambda g, x: g.half().to(g.dtype),
    "padded by a library call": lambda g, x: F.pad(g, (1, -1)),
    "sorted by a residual": lambda g, x: g.gather(1, x.sort(1)[1]),
    "a library's backward": lambda g, x: torch.ops.aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    "a convolution": lambda g, x: F.conv1d(g[:, None], x[:1, None, :1])[:, 0],
    "its spectrum": lambda g, x: torch.fft.irfft(torch.fft.rfft(g), g.shape[-1]),
}


@pytest.mark.parametrize("how", LINEAR)
def test_what_is_linear_is_transposed(how: str) -> None:
    """<jvp(t), g> == <t, backward(g)>."""
    change = LINEAR[how]
    torch.manual_seed(0)
    x, t, g = torch.randn(3, 2, 3)
    expected = (t * change(g, x)).sum()
    rtol = 2e-3 if how == "half and back" else 1e-4
    torch.testing.assert_close((tangent(change, x, t) * g).sum(), expected, rtol=rtol, atol=1e-4)


def test_only_the_arguments_with_a_tangent_matter() -> None:
    class Half(Function):
        @staticmethod
        def forward(ctx, x, y):
            return x * 3 + y

        @staticmethod
        def backward(ctx, g):
            return g * 3, g + 1

    fast = fusegrad.compile(Half).apply
    x = torch.ones(3)
    torch.testing.assert_close(jvp(lambda x: fast(x, torch.ones(3)), (x,), (x,))[1], 3 * x)
    with pytest.raises(NonLinearBackward, match="`add` adds a term"):
        jvp(lambda y: fast(x, y), (x,), (x,))


def test_a_trial_tells_linear_from_affine_and_worse() -> None:
    likes = [torch.zeros(4, 5), torch.zeros(3, dtype=torch.complex64), torch.zeros(2, dtype=torch.int64)]
    assert sums(lambda g: [g[0].T * 3, g[1].conj(), None], likes)
    assert not sums(lambda g: [g[0] + 1, g[1], None], likes)
    assert not sums(lambda g: [g[0], g[1].abs(), None], likes)
    assert not sums(lambda g: [g[0].sort()[0]], likes)
    assert not sums(lambda g: [g[0] / 0], likes)
    assert sums(lambda g: [g[0] * torch.rand(4, 5), g[0].new_zeros(0, 3)], likes)


BOUND: float | None = None


def test_what_backward_reads_from_outside_is_judged_as_it_is_now(monkeypatch) -> None:
    class Bounded(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 3 if BOUND is None else (g * 3).clamp(max=BOUND)

    fast = fusegrad.compile(Bounded).apply
    x = torch.ones(3)
    torch.testing.assert_close(jvp(fast, (x,), (x,))[1], 3 * x)
    monkeypatch.setitem(globals(), "BOUND", 1.0)
    with pytest.raises(NonLinearBackward, match="`clamp` is not linear"):
        jvp(fast, (x,), (x,))


def test_a_trial_draws_none_of_the_users_random_numbers() -> None:
    """Judged by a run on made-up numbers, which are nobody's."""
    fast: Any = fusegrad.compile(function_of(lambda g, x: g.cummax(0)[0]))
    x, state = torch.ones(3), torch.get_rng_state()
    with pytest.raises(NonLinearBackward, match="`cummax` is not linear"):
        jvp(fast.apply, (x,), (x,))
    assert torch.equal(torch.get_rng_state(), state)
