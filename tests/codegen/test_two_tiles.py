"""Rows as long as two powers of two together are two tiles, without lanes outside; the numbers are the reference's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Input, M, N, T, agree, full, graph_of, iota, op, where

from fusegrad.codegen import TARGETS, Target, generate, module
from fusegrad.ir import emit

CUDA = TARGETS["cuda:90"]
ROWS, WEIGHTS = Input("f32", (M, N)), Input("f32", (N,))


def softmax(x: T) -> T:
    e = (x - x.amax(1, keep=True)).exp()
    return e / e.sum(1, keep=True)


def softmax_of_bf16(x: T) -> T:
    return softmax(x.to("f32")).to("bf16")


def layer_norm(x: T, w: T) -> T:
    centred = x - x.mean(1, keep=True)
    return centred * ((centred * centred).mean(1, keep=True) + 1e-5).rsqrt() * w


def layer_backward(g: T, x: T) -> tuple[T, T, T]:
    """A gradient of rows, sums over them of each column, and one of all."""
    return g - g.mean(1, keep=True) - x * (g * x).mean(1, keep=True), (g * x).sum(0), g.sum(0, 1)


def products(x: T) -> tuple[T, T]:
    return x / x.reduce("amin", 1, keep=True), (x * 0.001 + 1.0).reduce("prod", 1)


def in_halves(x: T) -> T:
    return x - x.to("bf16").to("f32").sum(1, keep=True)


def marked(x: T, at: T) -> T:
    """The row but one of its columns, and what it adds up to without it."""
    others = where(op("eq", iota(N).reshape(1, N), at.reshape(M, 1)), 0.0, x)
    return others - others.sum(1, keep=True)


def dropped(x: T, seed: T) -> T:
    drawn = T(emit("random", seed.v, full(12345, (), "i64").v, shape=(M, N), dtype="f32", kind="uniform"))
    kept = where(drawn < 0.25, 0.0, x)
    return kept - kept.sum(1, keep=True)


def text_of(body: Callable[..., Any], columns: int, target: Target = CUDA, **inputs: Input) -> str:
    hints = {M: 512, N: columns}
    return module(generate(graph_of(body, **inputs), target=target, hints=hints, name="body").kernels)


BODIES = {
    softmax: {"x": ROWS}, layer_norm: {"x": ROWS, "w": WEIGHTS}, layer_backward: {"g": ROWS, "x": ROWS},
    products: {"x": ROWS}, in_halves: {"x": ROWS},
}  # fmt: skip


@pytest.mark.parametrize("columns", [1280, 1536, 5120])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_the_numbers_are_the_reference_s(body: Callable[..., Any], columns: int) -> None:
    for target in (CUDA, TARGETS["hip:gfx942"]):
        kernels = agree(body, {M: 5, N: columns}, target=target, slack=16, **BODIES[body])
        assert "joined(" in module(kernels.kernels)


def test_a_tile_of_its_own_for_what_the_first_one_leaves() -> None:
    text = text_of(layer_norm, 5120, x=ROWS, w=WEIGHTS)
    assert "col_tail = BLOCK_N + tl.arange(0, TAIL_N)" in text and "inside" not in text
    assert text.count("tl.store(") == 2, "the row, in two parts"


def test_columns_have_one_number_in_both_tiles() -> None:
    at = torch.tensor([0, 1023, 1024, 1025, 1279])
    kernels = agree(marked, {M: 5, N: 1280}, target=CUDA, slack=16, given={"at": at}, x=ROWS, at=Input("i64", (M,)))
    assert "lane_of(" in module(kernels.kernels) and "joined(" in module(kernels.kernels)


def test_numbers_are_drawn_by_the_column() -> None:
    given = {"seed": torch.tensor(2**40 + 99)}
    kernels = agree(dropped, {M: 3, N: 1280}, target=CUDA, slack=64, given=given, x=ROWS, seed=Input("i64", ()))
    assert "joined(" in module(kernels.kernels)


@pytest.mark.parametrize("columns", [4096, 5121, 5128, 7168, 4352, 768])
def test_other_rows_are_one_tile(columns: int) -> None:
    """A power of two; three of them or an odd one; one that is too small for all threads; several rows a tile."""
    assert "joined(" not in text_of(softmax, columns, x=ROWS)


def test_a_row_of_any_length_is_one_tile() -> None:
    graph = graph_of(softmax, x=ROWS)
    kernels = generate(graph, target=CUDA, hints={M: 512, N: 5120}, name="body", bounded=True)
    assert "joined(" not in module(kernels.kernels)


def test_threads_read_whole_accesses_of_both_tiles() -> None:
    rows = Input("bf16", (M, N))
    (kernel,) = generate(graph_of(softmax_of_bf16, x=rows), target=CUDA, hints={M: 512, N: 5120}, name="body").kernels
    assert kernel.num_warps == 4, "1024 columns, eight for each thread"
    (kernel,) = generate(graph_of(softmax_of_bf16, x=rows), target=CUDA, hints={M: 512, N: 8192}, name="body").kernels
    assert kernel.num_warps == 8
