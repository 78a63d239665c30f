"""Axes that a reshape divides: [N, C, H, W] as [N, groups, C * H * W / groups], whole where C is a multiple now."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.codegen.schedule.quotients import Quotients
from fusegrad.ir import Graph, emit
from fusegrad.ir.graph import building
from fusegrad.ir.types import TensorType

N, C, H, W = sympy.symbols("N C H W", integer=True, positive=True)
Tensor = torch.Tensor


class Grouped(Function):
    """Rows of groups of channels, divided by their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int) -> Tensor:
        rows = x.reshape(x.shape[0], groups, -1)
        total = rows.exp().sum(-1, keepdim=True)
        ctx.save_for_backward(rows, total)
        return (rows.exp() / total).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows, total = ctx.saved_tensors
        share = rows.exp() / total
        g = grad.reshape(rows.shape)
        return (share * (g - (g * share).sum(-1, keepdim=True))).reshape(grad.shape), None


class Interleaved(Function):
    """The same where the groups are in the last axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int) -> Tensor:
        columns = x.reshape(x.shape[0], -1, groups)
        ctx.save_for_backward(columns)
        return (columns * columns.sum(1, keepdim=True)).reshape(x.shape).sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (columns,) = ctx.saved_tensors
        total = columns.sum(1, keepdim=True)
        g = grad.reshape(columns.shape) * (columns * total).cos()
        return (g * total + (g * columns).sum(1, keepdim=True)).reshape(grad.shape), None


def quotients(before: tuple[Any, ...], after: tuple[Any, ...], hints: dict[sympy.Symbol, int]) -> Quotients:
    graph = Graph("g")
    x = graph.input(TensorType(before, "f32"), "x")
    with building(graph):
        graph.returning([emit("reshape", x, shape=after)])
    return Quotients.of(graph, hints)


@pytest.mark.parametrize(
    ("before", "after", "symbol", "divisor"),
    [
        ((N, C, H, W), (N, 32, C * H * W / 32), C, 32),
        ((N, 32, C * H * W / 32), (N, C, H, W), C, 32),
        ((N, H, W, C), (N, H * W * C / 6, 6), C, 6),
        ((N, C, H), (4, N * C * H / 4), N, 4),
        ((N, 3 * C, H), (N, 6, C * H / 2), C, 2),
    ],
)
def test_the_axis_that_is_divided(before: Any, after: Any, symbol: sympy.Symbol, divisor: int) -> None:
    whole = dict.fromkeys((N, C, H, W), 4 * 6 * 32)
    found = quotients(before, after, whole)
    assert found.whole.keys() == {symbol} and found.whole[symbol].as_coeff_Mul()[0] == divisor
    assert found.guards == (sympy.Eq(sympy.Mod(symbol, divisor), 0),)
    odd = quotients(before, after, {**whole, symbol: 4 * 6 * 32 + 1})
    assert not odd.whole and odd.guards == (sympy.Ne(sympy.Mod(symbol, divisor), 0),)


@pytest.mark.parametrize(
    ("before", "after"), [((N, C, H), (N * C, H)), ((C * H,), (C, H)), ((0, C), (C, 0)), ((N, C), (C, N)), ((), (1,))]
)
def test_nothing_is_divided(before: Any, after: Any) -> None:
    found = quotients(before, after, dict.fromkeys((N, C, H, W), 7))
    assert not found.whole and not found.guards


SIZES = ((2, 6, 8, 4), (2, 12, 5, 7), (3, 12, 16, 3), (2, 4, 6, 3), (2, 5, 6, 9), (1, 6, 4, 6))
"""The first and the last axis are multiples of 3, or are not, in turn."""


@pytest.mark.parametrize("function", [Grouped, Interleaved])
@pytest.mark.parametrize("order", [SIZES, SIZES[::-1]], ids=["whole first", "odd first"])
def test_all_sizes_come_to_kernels(function: Any, order: Any) -> None:
    fast: Any = fusegrad.compile(function, backend="interpret", fullgraph=True)
    for shape in order:
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
        results = []
        for cls in (fast, function):
            leaf = x.clone().requires_grad_()
            y = cls.apply(leaf, 3)
            results.append((y.detach(), *torch.autograd.grad(y, leaf, x.cos())))
        for ours, eager in zip(*results, strict=True):
            assert torch.allclose(ours, eager, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_whole_groups_are_one_kernel(direction: str) -> None:
    report = fusegrad.explain(Grouped, "bf16[32,512,64,64]", 32).directions[direction]
    assert [k.kind for k in report.launches] == ["triton"]
    (kernel,) = report.kernels[0].kernels
    assert any(g.has(sympy.Mod) and 32 in g.lhs.args for g in kernel.guards)
