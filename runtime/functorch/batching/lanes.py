"""Lanes of a batch: the first one as a stand-in for all, and a function that is mapped over them by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....tracer.containers import with_replaced
from ....tracer.torch_private import is_batched, plain_tensors
from ...capture.guards import is_float
from ..placeholders import example, readable

Tensor = torch.Tensor


def lane(value: Any, dim: int | None) -> Any:
    """The first lane of a tensor that has a batch axis; other values as they are."""
    if not isinstance(value, Tensor) or dim is None:
        return value
    return value.select(dim, 0) if value.shape[dim] else value.new_empty(_without(value.shape, dim))


def _without(sizes: Sequence[int], dim: int) -> list[int]:
    return [n for i, n in enumerate(sizes) if i != dim % len(sizes)]


def first_lanes(args: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """Arguments of one lane: memory of the batch, without a history of its own."""
    with plain_tensors(), torch.no_grad():
        return [_first_lane(a, d) for a, d in zip(args, dims, strict=True)]


def _first_lane(value: Any, dim: int | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    if is_batched(value):
        plain = example(lane(value, dim))
        readable([plain], [value])
        return plain
    return lane(value.detach(), dim).detach().requires_grad_(value.requires_grad and is_float(value))


def present_under_vmap(
    fn: Callable[..., Sequence[Any]], dims: tuple[int | None, ...], args: Sequence[Any], randomness: str
) -> Sequence[Any]:
    """vmap of a function whose outputs may be None."""
    present: list[int] = []
    total = 0

    def only_tensors(*lanes: Any) -> tuple[Any, ...]:
        nonlocal total
        outputs = tuple(fn(*lanes))
        total = len(outputs)
        present[:] = [i for i, o in enumerate(outputs) if o is not None]
        return tuple(outputs[i] for i in present)

    results = torch.vmap(only_tensors, dims, 0, randomness=randomness)(*args)
    return with_replaced([None] * total, present, results)
