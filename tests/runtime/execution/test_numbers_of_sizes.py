"""Numbers that Python makes of sizes: roots, quotients, logarithms; used in forward, and kept on ctx for backward."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.ir.errors import ParseError
from fusegrad.ir.text.document import size_from_document
from fusegrad.ir.text.text import plain_sympy, size_from, size_text
from fusegrad.runtime.values.sizes import evaluate
from fusegrad.tracer.arithmetic import compute_number
from fusegrad.tracer.capture.capture import Session

Made = Callable[[Any, Any], Any]
LEAVES: tuple[Made, ...] = (
    lambda n, m: n, lambda n, m: m, lambda n, m: n * m, lambda n, m: 7, lambda n, m: 0.3779, lambda n, m: n + 2 * m,
)  # fmt: skip
UNARY: tuple[Callable[[Any], Any], ...] = (
    math.sqrt, lambda a: a**0.5, lambda a: a**-0.5, lambda a: a ** (1 / 3), lambda a: 1 / a, lambda a: a**2,
    math.floor, math.ceil, round, math.log, lambda a: math.exp(-a), lambda a: abs(a - 3), lambda a: 1 / math.sqrt(a),
)  # fmt: skip
BINARY: tuple[Callable[[Any, Any], Any], ...] = (
    lambda a, b: a + b, lambda a, b: a * b, lambda a, b: a / b, lambda a, b: a // b, lambda a, b: a % b, max, min,
)  # fmt: skip


def made(rng: random.Random, depth: int) -> Made:
    """A random number of two sizes."""
    if depth == 0:
        return rng.choice(LEAVES)
    inner = made(rng, depth - 1)
    if rng.random() < 0.6:
        unary = rng.choice(UNARY)
        return lambda n, m: unary(inner(n, m))
    other, binary = made(rng, depth - 1), rng.choice(BINARY)
    return lambda n, m: binary(inner(n, m), other(n, m))


def tried(f: Made, n: Any, m: Any) -> float | None:
    """The number; None where Python has none, or none of a size that is worth a comparison."""
    try:
        found = f(n, m)
        return float(found) if not isinstance(found, complex) and 1e-6 < abs(found) < 1e6 else None
    except (ArithmeticError, ValueError):
        return None


PLACES = ((12, 35), (9, 8), (16, 33))


def numbers(seed: int, count: int) -> list[Made]:
    rng, found = random.Random(seed), list[Made]()
    while len(found) < count:
        f = made(rng, rng.choice((1, 2, 2, 3)))
        if all(tried(f, *place) is not None for place in PLACES):
            found.append(f)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_an_expression_of_sizes_is_the_number_that_it_was_made_from(seed) -> None:
    for f in numbers(seed, 10):
        session = Session()
        like = session.fake(torch.empty(12, 35))
        try:
            told = f(*like.shape)
        except RuntimeError:  # torch's own symbols have no such power
            continue
        if not isinstance(told, torch.SymInt | torch.SymFloat):
            continue
        expr, (n, m) = told.node.expr, (s.node.expr for s in like.shape)
        for place in PLACES if not session.env.guards else PLACES[:1]:
            at, right = dict(zip((n, m), place, strict=True)), f(*place)
            assert math.isclose(compute_number(expr, at), right, rel_tol=1e-12), expr
            assert math.isclose(evaluate(plain_sympy(expr), at), right, rel_tol=1e-9), expr
            again = size_from(size_text(expr), {str(n): n, str(m): m})
            assert math.isclose(evaluate(again, at), right, rel_tol=1e-9), size_text(expr)


class Scaled(Function):
    @staticmethod
    def forward(ctx, x, made):
        ctx.made = [f(*x.shape) for f in made]
        return sum((x * g for g in ctx.made), x)

    @staticmethod
    def backward(ctx, g):
        return sum((g * n for n in ctx.made), g), None


def _results(cls: Any, dtype: torch.dtype, place: tuple[int, int], made: tuple[Made, ...]) -> tuple[Any, Any]:
    x = torch.linspace(-1, 1, math.prod(place), dtype=dtype).reshape(place).requires_grad_()
    y = cls.apply(x, made)
    y.sum().backward()
    return y.detach(), x.grad


def _agree(fast: Any, dtype: torch.dtype, made: tuple[Made, ...], backend: str) -> None:
    rtol = {torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
    for place in PLACES:
        for a, b in zip(_results(fast, dtype, place, made), _results(Scaled, dtype, place, made), strict=True):
            assert torch.equal(a, b) if backend == "reference" else torch.allclose(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_numbers_of_sizes_in_both_methods(backend, dtype) -> None:
    fast = fusegrad.compile(Scaled, backend=backend)
    made = (
        lambda n, m: 1 / math.sqrt(n * m * 7), lambda n, m: (n * m) ** 0.5, lambda n, m: (n * m * 7) ** -0.5,
        lambda n, m: n ** (1 / 3), lambda n, m: math.log(n + m), lambda n, m: math.exp(-1 / n), lambda n, m: n % 4 / m,
        lambda n, m: round(n / 7) * 0.1, lambda n, m: 2.0**-n, lambda n, m: abs(n - m) * 0.5,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        _agree(fast, dtype, made, backend)
    assert not [str(w.message) for w in found if "FG1" in str(w.message)]
    report = fusegrad.explain(fast, torch.zeros(12, 35, dtype=dtype, requires_grad=True), made)
    assert {report.methods[m].status for m in ("forward", "backward")} == {"compiled"}


class Smoothed(Function):
    """F.one_hot makes a number of the size; what divides by that is a number, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(labels)
        v = x.shape[1]
        return x * (0.9 * torch.nn.functional.one_hot(labels, v) + 0.1 / v)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (labels,) = ctx.saved_tensors
        v = gradients[0].shape[1]
        return gradients[0] * (0.9 * torch.nn.functional.one_hot(labels, v) + 0.1 / v + (v / 2.0 - v * 0.5)), None


@pytest.mark.filterwarnings("error::fusegrad.FallbackWarning")
def test_floats_are_divided_by_sizes_that_became_numbers() -> None:
    fast = fusegrad.compile(Smoothed, backend="interpret", fullgraph=True)
    x, labels = torch.randn(5, 7, requires_grad=True), torch.randint(0, 7, (5,))
    y, expected = fast.apply(x, labels), Smoothed.apply(x, labels)
    assert torch.equal(y, expected)
    assert torch.equal(*(torch.autograd.grad(r.square().sum(), x)[0] for r in (y, expected)))


def test_a_stranger_s_size_bounds_its_work() -> None:
    def asked(size: str) -> Any:
        return size_from_document(size, {"s0": sympy.Symbol("s0", integer=True, positive=True)}, "here")

    for size in ("exp(exp(exp(9.0)))", "s0**99", "s0**s0", "9**(9**9)", "exp(s0)*exp(exp(s0))"):
        with pytest.raises(ParseError, match="no size"):
            asked(size)
