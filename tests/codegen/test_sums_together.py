"""Sums along a row that are ready at the same time are folded together: its warps wait for each other once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import INTERPRET, SMALL, Input, M, N, T, agree, graph_of

from fusegrad.codegen import TARGETS, Target, generate, module

ROWS = Input("f32", (M, N))


def layer_backward(g: T, x: T) -> T:
    return g - g.mean(1, keep=True) - x * (g * x).mean(1, keep=True)


def powers(x: T) -> T:
    squares = x * x
    sums = [v.sum(1, keep=True) for v in (x, squares, squares * x, squares * squares)]
    return x * sums[0] + sums[1] + sums[2] * sums[3]


def chain(x: T) -> T:
    centred = x - x.mean(1, keep=True)
    return centred * (centred * centred).mean(1, keep=True)


def largest(x: T) -> T:
    return x * x.amax(1, keep=True) + x.sum(1, keep=True)


def text_of(body: Callable[..., T], target: Target, columns: int = 4096, **inputs: Input) -> str:
    hints = {M: 512, N: columns}
    return module(generate(graph_of(body, **inputs), target=target, hints=hints, name="body").kernels)


@pytest.mark.parametrize("sizes", [{M: 13, N: 50}, {M: 1, N: 1}, {M: 6, N: 64}, {M: 3, N: 4096}], ids=str)
@pytest.mark.parametrize("target", [INTERPRET, SMALL, TARGETS["cuda:90"]], ids=["tiles", "chunks", "rows"])
def test_the_numbers_are_the_reference_s(sizes: dict[object, int], target: Target) -> None:
    kernels = agree(layer_backward, sizes, target=target, g=ROWS, x=ROWS)
    assert ("two_sums(" in module(kernels.kernels)) == (sizes[N] == 4096 and target.kind == "cuda")
    agree(powers, sizes, target=target, slack=16, x=ROWS)
    agree(chain, sizes, target=target, x=ROWS)


def test_sums_of_one_phase_and_no_others() -> None:
    cuda = TARGETS["cuda:90"]
    assert "two_sums(g, g * x)" in text_of(layer_backward, cuda, g=ROWS, x=ROWS)
    four = text_of(powers, cuda, x=ROWS)
    assert "sums = three_sums(x, " in four and four.count("tl.sum(") == 1, "at most three"
    for body in (chain, largest):
        assert "sums" not in text_of(body, cuda, x=ROWS), "one waits for the other, or is no sum"
    assert "sums" not in text_of(layer_backward, cuda, columns=64, g=ROWS, x=ROWS), "a warp holds several rows"
    assert "sums" not in text_of(layer_backward, cuda, columns=1 << 20, g=ROWS, x=ROWS), "in chunks"
