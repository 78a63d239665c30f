"""Counts of truths and places of extremes are 64 bits wide to torch; kernels count in 32, where sizes allow it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import Input, M, N, T, agree, graph_of, op

import fusegrad
from fusegrad.codegen import TARGETS, generate

X = Input("bf16", (M, N))
HUGE = 1 << 32


def count(x: T) -> T:
    return op("gt", x, x * 0.5).to("i64").sum(0)


def share_of_tops(x: T) -> T:
    tops = op("eq", x, x.amax(1, keep=True).expand(x.shape)).to("i64").sum(1, keep=True)
    return x * tops.to("bf16")


def of_numbers(x: T) -> T:
    """These are read, and may need all 64 bits."""
    return x.to("i64").sum(1)


@pytest.mark.parametrize("body", [count, share_of_tops, of_numbers])
@pytest.mark.parametrize("sizes", [{M: 37, N: 130}, {M: 1, N: 1}, {M: 300, N: 9}], ids=str)
def test_agrees(body: Callable[[T], T], sizes: dict[object, int]) -> None:
    agree(body, sizes, x=X)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "hints", "short"),
    [
        (count, {M: 8192, N: 4096}, True),
        (count, {M: HUGE, N: 64}, False),
        (share_of_tops, {M: 512, N: 65536}, True),
        (of_numbers, {M: 512, N: 512}, False),
    ],
)
def test_32_bits_where_they_hold_all_that_is_counted(
    body: Callable[[T], T], hints: dict[object, int], short: bool
) -> None:
    kernels = generate(graph_of(body, x=X), target=TARGETS["cuda:90"], hints=hints, name="body").kernels  # type: ignore[arg-type]
    sums = [line for k in kernels for line in k.source.splitlines() if "tl.zeros(" in line or "tl.sum(" in line]
    assert all("tl.int64" not in line for line in sums) == short


def test_another_kernel_counts_more() -> None:
    kernels = generate(graph_of(count, x=X), target=TARGETS["cuda:90"], hints={M: 8192, N: 4096}, name="body").kernels
    guards = [g for k in kernels for g in k.guards]
    assert all(bool(g.xreplace({M: 8192, N: 4096})) for g in guards)
    assert not all(bool(g.xreplace({M: HUGE, N: 4096})) for g in guards)


@pytest.mark.parametrize("shape", [(5, 7), (3, 5000), (1, 1), (700, 3)])
def test_places_of_extremes(shape: tuple[int, int]) -> None:
    def places(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.argmax(-1), x.argmin(0), x.argmax(-1) * (1 << 40), (x > 0).sum(-1) << 35

    x = torch.randint(-3, 3, shape).float()
    fast = fusegrad.compile(places, backend="interpret", fullgraph=True)
    for mine, theirs in zip(fast(x), places(x), strict=True):
        assert mine.dtype == torch.int64 and torch.equal(mine, theirs)
