"""Floats that Python computes anew in each step: the form that gives them to the last bit, or none."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz_loops import verdict_of
from torch import Tensor

import fusegrad
from fusegrad.tracer.loops.affine import Sample
from fusegrad.tracer.loops.floats import Float, Formula, formula_of

KNOWN: dict[str, Callable[[int, int], float]] = {
    "0.9 ** t": lambda t, n: 0.9**t,
    "0.9 ** (n - 1 - t)": lambda t, n: 0.9 ** (n - 1 - t),
    "1 - 0.999 ** (t + 1)": lambda t, n: 1 - 0.999 ** (t + 1),
    "1 / (1 - 0.9 ** (t + 1))": lambda t, n: 1 / (1 - 0.9 ** (t + 1)),
    "1e-3 * 0.95 ** t": lambda t, n: 1e-3 * 0.95**t,
    "-(0.9 ** t)": lambda t, n: -(0.9**t),
    "1 / (t + 1)": lambda t, n: 1 / (t + 1),
    "2 / (t + 2)": lambda t, n: 2 / (t + 2),
    "(t + 1) / n": lambda t, n: (t + 1) / n,
    "1 - t / n": lambda t, n: 1 - t / n,
    "0.1 * t": lambda t, n: 0.1 * t,
    "0.3 + 0.02 * t": lambda t, n: 0.3 + 0.02 * t,
    "(t + 1) ** 0.5": lambda t, n: (t + 1) ** 0.5,
}
UNKNOWN: dict[str, Callable[[int, int], float]] = {
    "a sine": lambda t, n: math.sin(t),
    "t * 0.01 or t / 100": lambda t, n: t * 0.01,
    "0.1 / (1 + 0.01 * t) or 10 / (100 + t)": lambda t, n: 0.1 / (1 + 0.01 * t),
    "a product": lambda t, n: math.prod([0.9] * t),
}


def found_for(f: Callable[[int, int], float]) -> Formula | None:
    floats: dict[Sample, Float] = {(t, n): Float(f(t, n)) for n in (5, 6) for t in range(n)}
    return formula_of(floats)


@pytest.mark.parametrize("name", KNOWN)
def test_a_form_is_found_and_has_every_bit(name: str) -> None:
    found = found_for(KNOWN[name])
    assert found is not None
    assert all(found.at(t, n) == KNOWN[name](t, n) for n in (7, 40, 700) for t in range(n))


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_may_be_another_form_later_is_none(name: str) -> None:
    assert found_for(UNKNOWN[name]) is None


def corrected(x: Tensor) -> Tensor:
    """Averages as Adam has them."""
    m, total = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for t in range(x.shape[0]):
        m = 0.9 * m + 0.1 * x[t]
        total = total + m / (1 - 0.9 ** (t + 1))
    return total


def test_bias_corrections_are_those_of_eager_for_every_length() -> None:
    with fusegrad.config.patch(disable="patience"):
        fast = fusegrad.compile(corrected)
        for dtype, steps in ((torch.float64, 12), (torch.float64, 31)):
            x = torch.randn(steps, 3, dtype=dtype, requires_grad=True)
            both = [[y, *torch.autograd.grad(y.sum(), x)] for y in (corrected(x), fast(x))]
            assert all(map(torch.equal, *both))
    assert verdict_of(fast) == "rolled"


def test_bias_corrections_in_kernels() -> None:
    pytest.importorskip("triton")
    with fusegrad.config.patch(disable="patience", backend="interpret", debug=True):
        x = torch.randn(12, 3, requires_grad=True)
        fast = fusegrad.compile(corrected)
        both = [[y, *torch.autograd.grad(y.sum(), x)] for y in (corrected(x), fast(x))]
        for a, b in zip(*both, strict=True):
            torch.testing.assert_close(a, b)
        assert verdict_of(fast) == "rolled"


LATER: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "a floor": lambda h, x, t: h * 0.5 + x * max(0.9**t, 0.05),
    "clamp": lambda h, x, t: (h + x).clamp(-(0.9**t), 0.9**t),
    "clamp, one side": lambda h, x, t: (h + x).clamp(max=1 / (t + 1)),
    "numbers alone": lambda h, x, t: h * 0.5 + torch.nn.functional.softplus(x, beta=1 + 0.5**t),
}


@pytest.mark.parametrize("name", LATER)
def test_steps_that_take_no_tensor_or_are_others_later_stay_right(name: str) -> None:
    """A form that fits short loops and no longer ones is traced step by step from there on, and nothing is eager."""

    class Scheduled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor, x: Tensor) -> Tensor:
            for t in range(x.shape[0]):
                h = LATER[name](h, x[t], t)
            return h

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g, None

    fast = fusegrad.compile(Scheduled, backend="reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusegrad.FallbackWarning)
        for steps in (12, 45, 30):
            given = torch.randn(5), torch.randn(steps, 5)
            assert torch.equal(fast.apply(*given), Scheduled.apply(*given))
        found = fusegrad.explain(fast, *given, target="cuda:90")
    assert found.directions["forward"].launch_count == 1
