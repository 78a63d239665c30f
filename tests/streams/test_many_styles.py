"""Functions in many styles, in streamed kernels on the interpreter, beside eager; and what `explain` says of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
import other_styles  # noqa: F401  (adds its classes to STYLES)
from beside_eager import differences, expanded, transposed_heads
from many_styles import STYLES, Style

each = pytest.mark.parametrize("style", STYLES, ids=lambda s: s.name)
IN_MEMORY = {"HardestTriplet"}
"""Distances are compared with the largest of them, bit for bit."""
CHECKS = "aten._assert_async"


def compiled(cls: Any) -> Any:
    return fusegrad.compile(cls, backend="interpret", fullgraph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [37, 97, 1])
@each
def test_beside_eager(style: Style, n: int, dtype: torch.dtype) -> None:
    assert not differences(compiled(style.cls).apply, style.cls.apply, style.arguments(n, dtype))


@pytest.mark.parametrize("of_gradients", [None, transposed_heads, expanded], ids=["contiguous", "heads", "expanded"])
@each
def test_layouts(style: Style, of_gradients: Any) -> None:
    arguments = [transposed_heads(a) for a in style.arguments(37)]
    assert not differences(compiled(style.cls).apply, style.cls.apply, arguments, of_gradients)


@each
def test_usual_sizes(style: Style) -> None:
    """Few kernels, nothing by torch, and no scores in memory; or the reason."""
    explanation = fusegrad.explain(fusegrad.compile(style.cls), *style.described(), target="cuda:90")
    for direction, most in zip(("forward", "backward"), style.launches, strict=True):
        report = explanation.directions[direction]
        lines = [line for line in report.products if line.startswith("stream ")]
        assert not report.reasons and len(report.launches) <= most
        if style.name in IN_MEMORY:
            assert all(": in memory, " in line for line in lines)
        else:
            assert lines and all(": never in memory, " in line for line in lines)


# ------------------------------------------------------------------------------------------------ what is compared
class AboveTheMean(Function):
    """What is above the mean of its row counts; backward finds it again."""

    @staticmethod
    def chosen(s):
        return s > s.mean(-1, keepdim=True)

    @staticmethod
    def forward(ctx, q, k, v):
        s = q @ k.mT
        ctx.save_for_backward(q, k, v)
        return torch.where(AboveTheMean.chosen(s), s, 0.0) @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v = ctx.saved_tensors
        s = q @ k.mT
        hit = AboveTheMean.chosen(s)
        ds = torch.where(hit, g @ v.mT, 0.0)
        return ds @ k, ds.mT @ q, torch.where(hit, s, 0.0).mT @ g


class LargestInForward(Function):
    """What is the largest of its row counts; backward finds it again."""

    @staticmethod
    def forward(ctx, q, k, v):
        s = q @ k.mT
        ctx.save_for_backward(q, k, v)
        return torch.where(s == s.amax(-1, keepdim=True), s, 0.0) @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v = ctx.saved_tensors
        s = q @ k.mT
        hit = s == s.amax(-1, keepdim=True)
        ds = torch.where(hit, g @ v.mT, 0.0)
        return ds @ k, ds.mT @ q, torch.where(hit, s, 0.0).mT @ g


@pytest.mark.parametrize(("cls", "is_in_memory"), [(AboveTheMean, True), (LargestInForward, False)])
def test_what_one_method_compares(cls: Any, is_in_memory: bool) -> None:
    """A row's extreme is where it was found."""
    arguments = [torch.randn(2, 97, 16).requires_grad_() for _ in range(3)]
    assert not differences(compiled(cls).apply, cls.apply, arguments)
    explanation = fusegrad.explain(fusegrad.compile(cls), *arguments)
    for report in explanation.directions.values():
        told = any("compares it with what is made of it, bit for bit" in line for line in report.products)
        assert told == is_in_memory


# --------------------------------------------------------------------------------------------------- sums over pairs
class Smoothed(Function):
    """Weights by distances that are differences first: there is no matmul in them."""

    @staticmethod
    def forward(ctx, x, y, v):
        w = torch.softmax(-(x[:, None] - y[None]).pow(2).sum(-1) / 2, dim=1)
        ctx.save_for_backward(x, y, v, w)
        return w @ v

    @staticmethod
    def backward(ctx, g):
        x, y, v, w = ctx.saved_tensors
        dw = g @ v.T
        ds = w * (dw - (w * dw).sum(1, keepdim=True))
        return ds @ y - ds.sum(1, keepdim=True) * x, ds.T @ x - ds.sum(0)[:, None] * y, w.T @ g


def test_sums_over_pairs_are_made_as_they_are_spelled() -> None:
    """What is saved of them is made again in backward, where matmuls sum it."""
    x, y, v = (torch.randn(n, 16).requires_grad_() for n in (37, 42, 42))
    assert not differences(compiled(Smoothed).apply, Smoothed.apply, [x, y, v])


# ------------------------------------------------------------------------------------------------------- what is NaN
class Spread(Function):
    """The largest and the least of a row, by one walk: neither is nothing to the other."""

    @staticmethod
    def forward(ctx, q, k):
        s = q @ k.mT
        high, low = s.amax(-1), s.amin(-1)
        ctx.save_for_backward(q, k)
        return high - low, (s * s).sum(-1)

    @staticmethod
    def backward(ctx, g, g_squares):
        q, k = ctx.saved_tensors
        ds = 2 * (q @ k.mT) * g_squares[..., None]
        return ds @ k, ds.mT @ q


@pytest.mark.parametrize("n", [17, 37, 65])
def test_extremes_beside_sums_at_the_end_of_a_stream(n: int) -> None:
    arguments = [torch.randn(2, n, 16).requires_grad_() for _ in range(2)]
    assert not differences(compiled(Spread).apply, Spread.apply, arguments)


# ----------------------------------------------------------------------------------------------------- what is nearest
class Codebook(Function):
    """Vectors as the nearest ones of a codebook, and their distance, as VQ-VAE has them: the places are integers."""

    @staticmethod
    def forward(ctx, z, e):
        d = z.pow(2).sum(1, keepdim=True) + e.pow(2).sum(1) - 2 * z @ e.t()
        i = d.argmin(1)
        q = e[i]
        ctx.save_for_backward(z, q, i)
        ctx.codes = e.shape[0]
        ctx.mark_non_differentiable(i)
        return q, ((q - z) ** 2).mean(), i

    @staticmethod
    def backward(ctx, gq, loss, _):
        z, q, i = ctx.saved_tensors
        c = 2 * (q - z) * loss / z.numel()
        return gq - 0.25 * c, torch.zeros(ctx.codes, z.shape[1], dtype=z.dtype).index_add(0, i, c)


@pytest.mark.parametrize("sizes", [(37, 29), (5, 131), (1, 1)])
def test_the_nearest_of_a_codebook(sizes: tuple[int, int]) -> None:
    """With kernels for all of it: an index that a row's extreme is at is read by the kernel that finds it."""
    torch.manual_seed(0)
    arguments = [torch.randn(n, 16).requires_grad_() for n in sizes]
    fast = fusegrad.compile(Codebook, backend="interpret", fullgraph=True)
    (q, loss, i), (right, other, at) = (cls.apply(*arguments) for cls in (fast, Codebook))
    assert torch.equal(i, at) and torch.equal(q, right)
    torch.testing.assert_close(loss, other)
    for ours, eager in zip(*(torch.autograd.grad((r, x), arguments, (r.detach(), x.detach()))
                             for r, x in ((q, loss), (right, other))), strict=True):  # fmt: skip
        torch.testing.assert_close(ours, eager)


def test_in_low_floats_nothing_is_much_nearer_than_what_is_chosen() -> None:
    """Distances are rounded, and which of two that are nearly equal is the least is nobody's promise."""
    torch.manual_seed(0)
    z, e = (torch.randn(n, 16).to(torch.bfloat16) for n in (37, 29))
    q, _, i = fusegrad.compile(Codebook, backend="interpret", fullgraph=True).apply(z, e)
    d = torch.cdist(z.double(), e.double()) ** 2
    assert torch.equal(q, e[i])
    assert bool((d.gather(1, i[:, None])[:, 0] <= d.amin(1) + 0.02 * d.amax(1)).all())


def test_distances_to_a_codebook_are_never_in_memory() -> None:
    described = [torch.empty(n, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (4096, 2051)]
    forward = fusegrad.explain(fusegrad.compile(Codebook), *described, target="cuda:90").directions["forward"]
    (line,) = (line for line in forward.products if line.startswith("stream "))
    assert ": never in memory, " in line and not forward.reasons
