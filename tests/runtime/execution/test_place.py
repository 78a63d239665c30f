"""Concatenations of products: the parts are written where they belong, and nothing is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from function_samples import leaf
from torch.autograd import Function

import fusegrad


class Chunks(Function):
    """Products of chunks of rows, one behind the other."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, chunk: int) -> Any:
        ctx.save_for_backward(x, w)
        return torch.cat([x[i : i + chunk] @ w.t() for i in range(0, x.shape[0], chunk)])

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x, None


class Kept(Function):
    """A part that is a result of its own, one that occurs twice, and parts beside each other: all are copied."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        a, b, c = x @ w, (x + 1) @ w, (x + 2) @ w
        return a, torch.cat((a, b)), torch.cat((c, c)), torch.cat((b.t() @ x, x.t() @ b.t().t()), 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_written_in_place(dtype: torch.dtype) -> None:
    fast: Any = fusegrad.compile(Chunks, backend="interpret")
    for rows in (24, 24, 24, 24, 16, 16, 20):  # often enough to be written out; then at other sizes
        x, w = (torch.randn(n, 40).to(dtype).requires_grad_() for n in (rows, 30))
        want = Chunks.apply(x, w, 8)
        torch.testing.assert_close(fast.apply(x, w, 8), want)
    fast.apply(x, w, 8).sum().backward()
    found = fusegrad.explain(Chunks, "bf16[8192,4096]", "bf16[32000,4096]", 1024)
    assert [k.kind for k in found.kernels][:8] == ["library"] * 8 and found.to_dict()["launches"]["forward"] == 8


@pytest.mark.parametrize("calls", [1, 6])
def test_no_operation_copies(calls: int) -> None:
    """What a plan runs, the second time and when it is written out, seen from below."""
    fast: Any = fusegrad.compile(Chunks, backend="interpret")
    x, w = leaf(24, 40), leaf(30, 40)
    for _ in range(calls):
        fast.apply(x, w, 8)
    with torch.profiler.profile() as seen:
        result = fast.apply(x, w, 8)
    counted = {e.key: e.count for e in seen.key_averages()}
    assert counted["aten::mm"] == 3 and not {"aten::cat", "aten::copy_", "aten::einsum"} & set(counted), counted
    assert result.is_contiguous() and result._base is None


def test_what_is_needed_elsewhere_is_copied() -> None:
    fast: Any = fusegrad.compile(Kept, backend="interpret")
    x, w = torch.randn(6, 5), torch.randn(5, 5)
    for _ in range(3):
        for one, other in zip(fast.apply(x, w), Kept.apply(x, w), strict=True):
            torch.testing.assert_close(one, other)


class Stacked(Function):
    """The product of one matrix, those of all others behind it; and rows that do not lie one behind the other."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        turned = x.transpose(0, 1)
        return torch.cat((((x[0] + 1) @ w)[None], x[1:] @ w)), torch.cat((turned[:1] @ w.t(), turned[1:] @ w.t()))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


def test_stacked_products_are_written_in_place() -> None:
    fast: Any = fusegrad.compile(Stacked, backend="interpret")
    for steps in (4, 4, 4, 4, 7):  # often enough to be written out; then at another size
        x, w = torch.randn(steps, 3, 5), torch.randn(5, 5)
        torch.testing.assert_close(fast.apply(x, w), Stacked.apply(x, w))
    found = fusegrad.explain(Stacked, "f32[512,64,128]", "f32[128,128]")
    # one kernel adds 1, one lays rows that do not out for the library
    assert sorted(k.kind for k in found.kernels) == ["library"] * 4 + ["triton"] * 2
