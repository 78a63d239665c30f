"""Rows that the blocks of a loop divide need no mask in it: a guard keeps it so, other sizes have another kernel."""

from __future__ import annotations

import pytest
import sympy
from harness import Input, M, N, T, agree

from fusegrad.codegen import TARGETS, Kernel
from fusegrad.ir.switches import switched_off

CUDA = TARGETS["cuda:90"]


def biased(x: T, b: T) -> tuple[T, T]:
    y = x + b.expand(x.shape)
    return y * y, y.sum(0)


def kernel_for(rows: int, columns: int = 256) -> Kernel:
    (kernel,) = agree(
        biased, {M: rows, N: columns}, target=CUDA, slack=16, x=Input("f32", (M, N)), b=Input("f32", (N,))
    ).kernels
    return kernel


def rows_of_block(kernel: Kernel) -> int:
    return int(kernel.constants["BLOCK_M"])


def test_no_mask_where_blocks_divide_the_rows() -> None:
    kernel = kernel_for(512)
    rows = rows_of_block(kernel)
    assert 1 < rows <= 16 and "inside_row" not in kernel.source
    assert sympy.Eq(sympy.Mod(M, rows), 0) in kernel.guards


@pytest.mark.parametrize("rows", [511, 3])
def test_a_mask_where_they_do_not(rows: int) -> None:
    kernel = kernel_for(rows)
    if rows_of_block(kernel) > 1:
        assert "inside_row" in kernel.source
    assert not any(g.has(sympy.Mod) and M in g.free_symbols for g in kernel.guards)


def test_the_switch_keeps_the_mask() -> None:
    with switched_off(["multiples"]):
        assert "inside_row" in kernel_for(512).source


def softmax_of_columns(x: T) -> T:
    e = (x - x.amax(0, keep=True)).exp()
    return e / e.sum(0, keep=True)


def column_kernel(rows: int, columns: int = 64) -> Kernel:
    sizes = {M: rows, N: columns}
    (kernel,) = agree(softmax_of_columns, sizes, target=CUDA, slack=16, x=Input("f32", (M, N))).kernels
    assert "for row_at" in kernel.source, "rows in chunks"
    return kernel


def test_chunks_of_any_size_have_no_mask_where_they_divide_the_row() -> None:
    kernel = column_kernel(2048)
    rows = rows_of_block(kernel)
    assert rows > 16 and "inside_row" not in kernel.source
    assert sympy.Eq(sympy.Mod(M, rows), 0) in kernel.guards


def test_chunks_have_a_mask_where_they_do_not() -> None:
    kernel = column_kernel(4080)
    assert "inside_row" in kernel.source and not any(M in g.free_symbols for g in kernel.guards if g.has(sympy.Mod))
