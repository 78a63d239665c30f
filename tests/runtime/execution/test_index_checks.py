"""Indices that are data: out of range they raise at every call, as in eager; none is checked that is known to be in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.ir.errors import IndexOutOfRangeError

Tensor = torch.Tensor
ROWS, COLUMNS = 6, 5


def reading(read: Callable[[Tensor, Tensor], Tensor]) -> type[Function]:
    """A Function that reads x at an index, times two."""

    class Reads(Function):
        @staticmethod
        def forward(x: Tensor, index: Tensor) -> Tensor:
            return read(x, index) * 2.0

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, index = ctx.saved_tensors
            return read(x, index).sum() * g.sum() + x, None

    return Reads


def rows(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % ROWS


READS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, str]] = {
    "gather": (lambda x, i: x.gather(0, i), rows(7, COLUMNS), "gather"),
    "one per row": (lambda x, i: x.gather(1, i[:, None])[:, 0], rows(ROWS) % COLUMNS, "gather"),
    "of what is computed": (lambda x, i: x.exp().gather(1, i[:, None])[:, 0], rows(ROWS) % COLUMNS, "gather"),
    "index_select": (lambda x, i: x.index_select(0, i), rows(9), "index_select"),
    "embedding": (lambda x, i: torch.nn.functional.embedding(i, x), rows(3, 4), "embedding"),
    "padded embedding": (lambda x, i: torch.nn.functional.embedding(i, x, padding_idx=2), rows(3, 4), "embedding"),
    "x[i]": (lambda x, i: x[i], rows(8), "index"),
    "x[i, j]": (lambda x, i: x[i, i % 3], rows(2, 3), "index"),
    "x[i, None, j]": (lambda x, i: x[i[:, None], torch.arange(COLUMNS)], rows(4), "index"),
    "x[:, i]": (lambda x, i: x[:, i], rows(4) % COLUMNS, "index"),
    "put": (lambda x, i: x.index_put((i,), x[0] * 2), torch.arange(ROWS), "index_put"),
    "put in place": (lambda x, i: _put(x, i), torch.arange(ROWS), "index_put"),
    "added": (lambda x, i: x.long().index_put((i,), x[0].long(), accumulate=True) * 1.0, rows(9), "index_put"),
    "scatter": (lambda x, i: x.scatter(0, i, 3.0), rows(1, COLUMNS), "scatter"),
    "scatter_add": (lambda x, i: x.long().scatter_add(0, i, x.long()) * 1.0, rows(4, COLUMNS), "scatter_add"),
    "index_add": (lambda x, i: x.long().index_add(0, i, x.long()) * 1.0, torch.arange(ROWS), "index_add"),
    "index_copy": (lambda x, i: x.index_copy(0, i, x * 2), torch.arange(ROWS), "index_copy"),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.0), torch.arange(3), "index_fill"),
}  # fmt: skip
WRAPS = {"x[i]", "x[i, j]", "x[i, None, j]", "x[:, i]", "put", "put in place", "added", "index_fill"}
"""Those for which eager counts negative indices from the end."""


def _put(x: Tensor, i: Tensor) -> Tensor:
    y = x.clone()
    y[i] = x[1]
    return y


def x_of() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))


def with_one(index: Tensor, wrong: int) -> Tensor:
    """The index with another number in the middle."""
    flat = index.flatten().clone()
    flat[flat.numel() // 2] = wrong
    return flat.reshape(index.shape)


def agree(fast: Any, cls: Any, *args: Any) -> None:
    assert torch.equal(fast.apply(*args), cls.apply(*args))


@pytest.mark.parametrize("name", READS)
def test_every_call_with_an_index_out_of_range_raises(name: str) -> None:
    read, index, operation = READS[name]
    cls = reading(read)
    fast, x = fusegrad.compile(cls, backend="interpret", fullgraph=True), x_of()
    agree(fast, cls, x, index)
    for wrong in (ROWS, 10**6, -ROWS - 1, -(2**40)):
        with pytest.raises(IndexOutOfRangeError, match=rf"Reads_forward.*: {operation}_?: .*out of range") as caught:
            fast.apply(x, with_one(index, wrong))
        assert "test_index_checks.py:" in str(caught.value)
        with pytest.raises((IndexError, RuntimeError)):
            cls.apply(x, with_one(index, wrong))
    agree(fast, cls, x, index)


@pytest.mark.parametrize("name", READS)
def test_negative_indices_are_what_they_are_in_eager(name: str) -> None:
    read, index, _ = READS[name]
    cls = reading(read)
    fast, x = fusegrad.compile(cls, backend="interpret", fullgraph=True), x_of()
    agree(fast, cls, x, index)
    negative = with_one(index, -1)
    if name in WRAPS:
        agree(fast, cls, x, negative)
    else:
        with pytest.raises((IndexError, RuntimeError)):
            cls.apply(x, negative)
        with pytest.raises(IndexOutOfRangeError):
            fast.apply(x, negative)
