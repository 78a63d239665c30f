"""Slices whose bounds are data (`offsets.tolist()`): as in eager, compiled around what reads them, on record."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import fusegrad


class Grouped(Function):
    """Rows of each expert, sorted, by its own matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, ends)
        stops = ends.tolist()
        return torch.cat([x[a:b] @ w[e] for e, (a, b) in enumerate(zip([0, *stops], stops, strict=False))])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, ends = ctx.saved_tensors
        stops = ends.tolist()
        dw, dx = torch.zeros_like(w), []
        for e, (a, b) in enumerate(zip([0, *stops], stops, strict=False)):
            dx.append(g[a:b] @ w[e].mT)
            dw[e].addmm_(x[a:b].mT, g[a:b])
        return torch.cat(dx), dw, None


def test_groups_of_any_length() -> None:
    x, w, g = torch.randn(37, 16, requires_grad=True), torch.randn(3, 16, 8, requires_grad=True), torch.randn(37, 8)
    fast = fusegrad.compile(Grouped, backend="interpret")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for stops in ([10, 20, 37], [0, 20, 37], [5, 5, 37]):
            ours, eager = (
                torch.autograd.grad(f.apply(x, w, torch.tensor(stops)), (x, w), g) for f in (fast, Grouped)
            )  # fmt: skip
            for a, b in zip(ours, eager, strict=True):
                torch.testing.assert_close(a, b)
    assert "the data of a tensor" in str(fusegrad.explain(fast, x, w, torch.tensor([10, 20, 37])))
