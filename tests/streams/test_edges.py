"""Rows of nothing, infinities, NaN, finite masks, ties, and sizes at the ends: as in eager, NaN in the same places."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad

sys.path.insert(0, str(Path(__file__).parent))
from beside_eager import differences
from stream_functions import AddedMask, Alibi, Textbook, named, positions

Tensor = torch.Tensor
INF, NAN = float("inf"), float("nan")
LOWEST = torch.finfo(torch.float32).min
N, D = 40, 8


def compiled(cls: Any) -> Any:
    return fusegrad.compile(cls, backend="interpret", fullgraph=True)


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    random = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]


def attention(n: int = N, m: int = N, d: int = D) -> list[Tensor]:
    return tensors((2, n, d), (2, m, d), (2, m, d))


# ------------------------------------------------------------------------------------------------ masks from memory
def _filled(value: float, rows: Any = slice(None), columns: Any = slice(None)) -> Tensor:
    mask = torch.zeros(1, N, N)
    mask[:, rows, columns] = value
    return mask


MASKS = {
    "a row of -inf": _filled(-INF, 3),
    "a column of -inf": _filled(-INF, slice(None), 5),
    "all but the last place": _filled(-INF, slice(None), slice(0, N - 1)),
    "first blocks of -inf": _filled(-INF, slice(0, 20), slice(0, 33)),
    "everything -inf": _filled(-INF),
    "one +inf": _filled(INF, 7, 35),
    "one NaN": _filled(NAN, 7, 2),
    "a NaN late": _filled(NAN, 7, 39),
    "a row of the lowest number": _filled(LOWEST, 3),
    "a row of -1e30": _filled(-1e30, slice(2, 9)),
    "first blocks of -1e30": _filled(-1e30, slice(None), slice(0, 33)),
    "everything -1e30": _filled(-1e30),
    "scores of 1e4": _filled(1e4),
    "scores of -1e4": _filled(-1e4),
    "low scores first": _filled(-300.0, slice(None), slice(0, 33)),
    "high scores first": _filled(300.0, slice(None), slice(0, 33)),
}


class ByLogarithm(Function):
    """An added mask; probabilities by way of logsumexp, which guards against infinities in its own way."""

    @staticmethod
    def forward(ctx, q, k, v, mask, scale):
        s = (q @ k.mT) * scale + mask
        ctx.save_for_backward(q, k, v, mask)
        ctx.scale = scale
        return torch.exp(s - torch.logsumexp(s, -1, keepdim=True)) @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v, mask = ctx.saved_tensors
        s = (q @ k.mT) * ctx.scale + mask
        p = torch.exp(s - torch.logsumexp(s, -1, keepdim=True))
        dp = g @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * ctx.scale
        return ds @ k, ds.mT @ q, p.mT @ g, None, None


@pytest.mark.parametrize("mask", MASKS)
def test_added_masks(mask: str) -> None:
    assert not differences(compiled(AddedMask).apply, AddedMask.apply, [*attention(), MASKS[mask], D**-0.5])


IN_DIGITS = [m for m in MASKS if "lowest" not in m and "1e30" not in m]
"""Beside a great number the logarithm is lost: eager has 1 in the place of 1 / n."""


@pytest.mark.parametrize("mask", IN_DIGITS)
def test_added_masks_by_logarithm(mask: str) -> None:
    assert not differences(compiled(ByLogarithm).apply, ByLogarithm.apply, [*attention(), MASKS[mask], D**-0.5])


class Unmasked(Function):
    """The maximum is of what a mask leaves; the sum is of everything: no first block is nothing to it."""

    @staticmethod
    def scores(q, k):
        s = q @ k.mT
        _, j = positions(s)
        return s, torch.where(j >= 33, s, -INF).amax(-1, keepdim=True)

    @staticmethod
    def forward(ctx, q, k, v):
        s, m = Unmasked.scores(q, k)
        ctx.save_for_backward(q, k, v)
        return torch.exp(s - m) @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v = ctx.saved_tensors
        s, m = Unmasked.scores(q, k)
        p = torch.exp(s - m)
        ds = p * (g @ v.mT)
        return ds @ k, ds.mT @ q, p.mT @ g


def test_a_maximum_of_fewer_places_than_the_sum() -> None:
    assert not differences(compiled(Unmasked).apply, Unmasked.apply, attention())


# ------------------------------------------------------------------------------------------------- masks by places
def by_places(condition: Any, number: Any) -> type:
    """Attention with a mask by the places of rows and columns, and their counts."""

    class Masked(Function):
        @staticmethod
        def probabilities(q, k):
            s = q @ k.mT
            i, j = positions(s)
            return torch.softmax(torch.where(condition(i, j, *s.shape[-2:]), s, number), -1)

        @staticmethod
        def forward(ctx, q, k, v):
            out = Masked.probabilities(q, k) @ v
            ctx.save_for_backward(q, k, v, out)
            return out

        @staticmethod
        def backward(ctx, g):
            q, k, v, out = ctx.saved_tensors
            p = Masked.probabilities(q, k)
            ds = p * (g @ v.mT - (g * out).sum(-1, keepdim=True))
            s = q @ k.mT
            i, j = positions(s)
            ds = torch.where(condition(i, j, *s.shape[-2:]), ds, 0.0)
            return ds @ k, ds.mT @ q, p.mT @ g

    return Masked


CONDITIONS = {
    "top-left": lambda i, j, n, m: j <= i,
    "bottom-right": lambda i, j, n, m: j - i <= m - n,
    "strictly causal": lambda i, j, n, m: j < i,
    "window": lambda i, j, n, m: (j <= i) & (i - j < 5),
    "window ahead": lambda i, j, n, m: (j >= i + 3) & (j < i + 9),
    "behind the end": lambda i, j, n, m: j >= i + 30,
    "nothing": lambda i, j, n, m: j >= m + i,
    "prefix or causal": lambda i, j, n, m: (j < 4) | (j <= i),
    "all but itself": lambda i, j, n, m: i != j,
}


@pytest.mark.parametrize("number", [-INF, -1e30, LOWEST, -50.0])
@pytest.mark.parametrize(("n", "m"), [(40, 40), (61, 35), (35, 61)])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_masks_by_places(condition: str, n: int, m: int, number: float) -> None:
    cls = by_places(CONDITIONS[condition], number)
    assert not differences(compiled(cls).apply, cls.apply, attention(n, m))


# ------------------------------------------------------------------------------------------------------------ sizes
SIZES = {
    "no batch": (0, 40, 40, 8), "no query": (2, 0, 40, 8), "one query": (2, 1, 40, 8), "one key": (2, 40, 1, 8),
    "head size 1": (2, 40, 40, 1), "head size 3": (2, 40, 40, 3), "head size 80": (1, 100, 100, 80),
    "head size 256": (1, 270, 270, 256), "head size 257": (1, 270, 270, 257), "two by two": (2, 2, 2, 1),
}  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES)
def test_sizes(sizes: str) -> None:
    b, n, m, d = SIZES[sizes]
    arguments = tensors((b, n, d), (b, m, d), (b, m, d))
    assert not differences(compiled(Textbook).apply, Textbook.apply, arguments)


@pytest.mark.parametrize("sizes", ["no batch", "no query", "one query", "one key", "two by two"])
def test_sizes_after_others(sizes: str) -> None:
    """The class was compiled for longer ones."""
    fast, (b, n, m, d) = compiled(Textbook), SIZES[sizes]
    assert not differences(fast.apply, Textbook.apply, tensors((2, 40, d), (2, 40, d), (2, 40, d)))
    assert not differences(fast.apply, Textbook.apply, tensors((b, n, d), (b, m, d), (b, m, d)))


def test_values_of_infinity() -> None:
    """Nothing is skipped where nothing is masked: 0 * inf is NaN."""
    q, k, v = attention()
    v = torch.where(torch.arange(N)[:, None] == 37, INF, v.detach()).requires_grad_()
    assert not differences(compiled(Textbook).apply, Textbook.apply, [q, k, v])


def test_slopes_of_zero() -> None:
    q, k, v, slopes, scale = named("Alibi").arguments(40, 8)
    assert not differences(compiled(Alibi).apply, Alibi.apply, [q, k, v, torch.zeros_like(slopes), scale])
