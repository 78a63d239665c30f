"""Calls that write to memory which is met twice run as written, on record; others of the class are compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusegrad

ROWS, COLUMNS = 5, 3


def scale_row(x: Tensor, y: Tensor) -> Tensor:
    x[2].mul_(2.0)
    return x + y


def expanded() -> tuple[Tensor, Tensor]:
    return torch.randn(1, COLUMNS).expand(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS)


def overlapping() -> tuple[Tensor, Tensor]:
    return torch.randn(12).as_strided((ROWS, COLUMNS), (2, 1)), torch.randn(ROWS, COLUMNS)


def one_in_another() -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, COLUMNS)
    return x, x[2]


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("made", [expanded, overlapping, one_in_another])
def test_memory_that_is_met_twice(made: Callable[[], tuple[Tensor, Tensor]], backend: str) -> None:
    fast = fusegrad.compile(scale_row, backend=backend)
    with pytest.warns(fusegrad.FallbackWarning, match="two elements of one, share") as warned:
        for _ in range(2):
            torch.manual_seed(0)
            given = made()
            found = fast(*given)
            torch.manual_seed(0)
            expected = made()
            torch.testing.assert_close(found, scale_row(*expected), rtol=0, atol=0)
            torch.testing.assert_close(given, expected, rtol=0, atol=0)
    assert len(warned) == 1 and fusegrad.explain(fast).methods["shared memory"].code == "FG057"


@pytest.mark.filterwarnings("error::fusegrad.FallbackWarning")
def test_gaps_between_elements_are_no_shared_memory() -> None:
    fast = fusegrad.compile(scale_row, backend="interpret")
    for strides in ((COLUMNS, 1), (1, ROWS), (7, 2), (2, 11)):
        x = torch.randn(64).as_strided((ROWS, COLUMNS), strides)
        given = x.clone()
        expected = scale_row(given, torch.ones(COLUMNS))
        assert torch.equal(fast(x, torch.ones(COLUMNS)), expected) and torch.equal(x, given)
