"""Rows of a tensor whose dimensions were joined, read at places that are data: a place is divided only where memory
asks for it, and its parts are proved to be inside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusegrad
from fusegrad.runtime.settings import config

Read = Callable[[Tensor, Tensor], Tensor]
IMAGES, ROWS = (2, 3, 5, 6), (4, 5)


def per_channel(x: Tensor, i: Tensor) -> Tensor:
    """As a sampler of images reads its corners."""
    return x.flatten(2).gather(2, i[:, None].expand(-1, x.shape[1], -1)) * 2.0


def of_all(x: Tensor, i: Tensor) -> Tensor:
    return x.reshape(-1)[i] + 1.0


def of_the_middle(x: Tensor, i: Tensor) -> Tensor:
    return x.flatten(1, 2)[:, i] * 2.0


def of_what_is_computed(x: Tensor, i: Tensor) -> Tensor:
    return (x * 2.0).reshape(x.shape[0], -1)[:, i].sin()


CASES: dict[str, tuple[Read, Tensor, int, tuple[int, ...]]] = {
    "images": (per_channel, torch.randn(IMAGES), 30, (2, 7)),
    "channels last": (per_channel, torch.randn(IMAGES).to(memory_format=torch.channels_last), 30, (2, 7)),
    "every other column": (per_channel, torch.randn(IMAGES)[..., ::2], 15, (2, 7)),
    "all": (of_all, torch.randn(IMAGES), 180, (9,)),
    "all of what was turned": (of_all, torch.randn(IMAGES).mT, 180, (9,)),
    "all of columns": (of_all, torch.randn(ROWS).t(), 20, (3, 3)),
    "behind ones": (of_all, torch.randn(1, 7, 1, 3), 21, (9,)),
    "the middle": (of_the_middle, torch.randn(IMAGES), 15, (4,)),
    "computed": (of_what_is_computed, torch.randn(IMAGES), 90, (3, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_beside_eager_in_one_kernel(name: str) -> None:
    read, x, count, shape = CASES[name]
    index = torch.randint(count, shape)
    fast = fusegrad.compile(read)
    report = fusegrad.explain(fast, x.to("meta"), index.to("meta"), target="cuda:90")
    assert report.directions["forward"].launch_count == 1
    with config.patch(backend="interpret"):
        torch.testing.assert_close(fast(x, index), read(x, index))
        with pytest.raises(IndexError):
            fast(x, torch.full(shape, count))


def test_where_memory_is_joined_no_place_is_divided() -> None:
    x, index = torch.empty(IMAGES, device="meta"), torch.empty(2, 7, dtype=torch.int64, device="meta")
    text = fusegrad.explain(fusegrad.compile(per_channel), x, index, target="cuda:90").kernels[0].source
    assert "index" in text and "floor_quotient" not in text and "modulo" not in text
