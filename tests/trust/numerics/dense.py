"""Numbers to try operations on: whole ranges of 16-bit floats, random bit patterns, and what is special."""

from __future__ import annotations

import itertools
import math

import torch

Tensor = torch.Tensor
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
NEAR = (0.0, 0.5, 0.625, 1.0, 2.0, math.pi / 2, math.pi, 4.0, 8.0, 16.0, 20.0, 88.0)
"""Where formulas change hands, and where functions have zeros."""


def specials(dtype: torch.dtype) -> list[float]:
    """NaN, infinities, signed zeros, subnormals, the largest and smallest, halves and odd integers."""
    kind = torch.finfo(dtype)
    least = torch.ones(1, dtype=BITS[dtype]).view(dtype).item()
    grid = float(2 ** round(-math.log2(kind.eps)))
    sizes = [
        0.0, least, kind.tiny / 2, kind.tiny, kind.eps, 0.25, 0.5, 1 - kind.eps / 2, 1.0, 1 + kind.eps, 1.5, 2.0, 2.5,
        3.0, 3.5, grid - 0.5, grid - 1.0, grid, grid + 1.0, kind.max / 2, kind.max, math.inf,
    ]  # fmt: skip
    return [s * number for number in sizes for s in (1.0, -1.0)] + [math.nan]


def patterns(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Random bit patterns: every exponent is as likely as any other."""
    whole = BITS[dtype]
    limits = torch.iinfo(whole)
    drawn = torch.randint(limits.min, limits.max, (count,), dtype=whole, generator=torch.manual_seed(seed))
    return drawn.view(dtype)


def everything(dtype: torch.dtype, count: int = 1 << 16) -> Tensor:
    """All 65,536 numbers of 16 bits; else specials, random bits, and numbers of ordinary size near where it matters."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    special = torch.tensor(specials(dtype), dtype=dtype)
    random = torch.Generator().manual_seed(1)
    spread = torch.randn(count // 4, dtype=dtype, generator=random) * 10
    around = torch.cat([
        (c + torch.randn(count // 64, dtype=dtype, generator=random) * 1e-2) * s for c in NEAR for s in (1, -1)
    ])  # fmt: skip
    return torch.cat([special, patterns(dtype, count // 2, 2), spread, around])


def pairs(dtype: torch.dtype, count: int = 1 << 16) -> tuple[Tensor, Tensor]:
    """Every pair of specials, random bits, ordinary sizes, and equal or nearly equal numbers."""
    special = torch.tensor(list(itertools.product(specials(dtype), repeat=2)), dtype=dtype)
    random = torch.Generator().manual_seed(3)
    spread = (torch.randn(2, count // 4, generator=random, dtype=torch.float64) * 10).to(dtype)
    close = torch.randn(count // 4, generator=random, dtype=torch.float64) * 100
    near = (close * (1 + torch.randint(-2, 3, close.shape, generator=random) * torch.finfo(dtype).eps)).to(dtype)
    x = torch.cat([special[:, 0], patterns(dtype, count // 2, 4), spread[0], close.to(dtype)])
    y = torch.cat([special[:, 1], patterns(dtype, count // 2, 5), spread[1], near])
    return x, y


def integers(dtype: torch.dtype, count: int = 1 << 14) -> Tensor:
    """All of 8 bits; else the ends of the range, small numbers and random bits."""
    if dtype == torch.bool:
        return torch.tensor([False, True] * 8)
    limits = torch.iinfo(dtype)
    if limits.bits == 8:
        return torch.arange(limits.min, limits.max + 1, dtype=torch.int32).to(dtype)
    ends = [limits.min, limits.min + 1, limits.max, limits.max - 1, *range(-9, 10), 2**24 + 1, 2**53 + 1, 12345]
    known = torch.tensor([n for n in ends if limits.min <= n <= limits.max], dtype=dtype)
    random = torch.randint(limits.min, limits.max, (count,), dtype=dtype, generator=torch.manual_seed(6))
    return torch.cat([known, random])


def integer_pairs(dtype: torch.dtype, count: int = 1 << 14) -> tuple[Tensor, Tensor]:
    """All pairs of what is short, and random pairs."""
    short = integers(dtype, count)[: 256 if dtype != torch.bool else 2]
    x, y = torch.cartesian_prod(short, short).unbind(1)
    if dtype in (torch.bool, torch.int8, torch.uint8):
        return x.contiguous(), y.contiguous()
    many = integers(dtype, count)
    shuffled = many[torch.randperm(len(many), generator=torch.manual_seed(7))]
    return torch.cat([x, many]), torch.cat([y, shuffled])
