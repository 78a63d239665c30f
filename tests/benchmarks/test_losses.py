"""The losses and softmaxes of the benchmarks under the interpreter, beside eager and float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import fusegrad
from fusegrad.benchmarks import functions as f

LONG = 70_001
"""Columns that the interpreter's kernels read in chunks."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def logits(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) * 4).to(dtype)


def targets(rows: int, columns: int) -> Tensor:
    """The first and the last column are among them."""
    target = torch.randint(0, columns, (rows,), generator=torch.Generator().manual_seed(rows))
    target[0], target[-1] = 0, columns - 1
    return target


class Wide(TorchFunctionMode):
    """x.float() is x.double(): a Function in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (Tensor.double if func is Tensor.float else func)(*args, **(kwargs or {}))


def widened(argument: Any) -> Any:
    return argument.double() if isinstance(argument, Tensor) and argument.is_floating_point() else argument


def gradients(function: Any, x: Tensor, rest: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The result, and the gradient that backward has for it."""
    x = x.detach().clone().requires_grad_()
    result = function.apply(x, *rest)
    # Of whole numbers, which all dtypes have
    cotangent = torch.randint(-4, 5, result.shape, generator=torch.Generator().manual_seed(1)) * 2 + 1
    (gradient,) = torch.autograd.grad(result, x, cotangent.to(result.dtype))
    return result.detach(), gradient


def check(function: Any, x: Tensor, *rest: Any) -> None:
    """No further from float64 than eager is, and one unit in the last place of the largest number."""
    fast = fusegrad.compile(function, backend="interpret")
    got, eager = gradients(fast, x, rest), gradients(function, x, rest)
    with Wide():
        exact = gradients(function, x.double(), [widened(r) for r in rest])
    assert not [r.reason for r in fast._fusegrad.ledger.records.values() if r.reason]
    for mine, theirs, true in zip(got, eager, exact, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert torch.equal(mine.isnan(), theirs.isnan())
        step = torch.finfo(mine.dtype).eps * true.abs().nan_to_num(0, 0, 0).max()
        error, allowed = ((v.double() - true).abs().nan_to_num(0, 0, 0).max() for v in (mine, theirs))
        assert error <= 1.5 * allowed + 2 * step, (error, allowed, step)


SMOOTHED = (0.1, 1e-4, 30.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 1), (7, 50), (3, 1000), (2, LONG), (2, LONG + 15)])
def test_cross_entropies(rows: int, columns: int, dtype: torch.dtype) -> None:
    x, target = logits(rows, columns, dtype), targets(rows, columns)
    check(f.CrossEntropy, x, target, -100)
    check(f.SmoothedCrossEntropy, x, target, *SMOOTHED)
    check(f.CrossEntropy, x, torch.where(torch.arange(rows) % 2 == 0, -100, target), -100)


@pytest.mark.parametrize("columns", [50, LONG])
def test_no_row_counts(columns: int) -> None:
    """The mean of nothing is NaN, as in eager; so are its gradients."""
    check(f.CrossEntropy, logits(3, columns, torch.bfloat16), torch.full((3,), -100), -100)
    check(f.CrossEntropy, logits(3, columns, torch.float32), torch.full((3,), 7), 7)


@pytest.mark.parametrize("columns", [50, LONG])
def test_masked_logits(columns: int) -> None:
    """-inf where a token is not allowed; a row of nothing else has NaN for a gradient."""
    x = logits(4, columns, torch.bfloat16)
    x[0, 3:] = -float("inf")
    x[1, ::2] = -float("inf")
    x[2] = -float("inf")
    check(f.CrossEntropy, x, torch.tensor([0, 1, 2, 3]), -100)
    check(f.CrossEntropy, x[:2], torch.tensor([0, 1]), -100)
    check(f.SmoothedCrossEntropy, x, torch.tensor([0, 1, 2, 3]), *SMOOTHED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 50, 1000, LONG])
def test_softmaxes_and_divergences(columns: int, dtype: torch.dtype) -> None:
    x = logits(3, columns, dtype)
    check(f.Softmax, x)
    if columns <= 1000:
        check(f.CausalSoftmax, x.expand(2, 3, columns))
        check(f.ColumnSoftmax, x)
    if dtype == torch.float32:
        p, q = x.log_softmax(-1), logits(4, columns, dtype)[:3].log_softmax(-1)
        check(f.KLDivergence, p, q.exp())
        check(f.JSDivergence, p, q, 0.5)
