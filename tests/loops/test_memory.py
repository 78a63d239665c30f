"""What a loop makes of its arguments without copying it, and what it fills: memory is shared as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import fusegrad

ANY = Any


def last_of_all(ctx: ANY, x: Tensor) -> ANY:
    for xt in x:
        last = xt
    return last


def last_by_index(ctx: ANY, x: Tensor) -> ANY:
    h = x[0]
    for t in range(1, x.shape[0]):
        h = x[t]
        k = h * 2
    return k, h


def list_of_slices(ctx: ANY, x: Tensor) -> ANY:
    hs = [x[t] for t in range(x.shape[0])]
    return torch.stack(hs), hs[3], hs[0], hs[-1]


def stacked_again(ctx: ANY, x: Tensor) -> ANY:
    a = torch.stack([x[t] * 2 for t in range(x.shape[0])])
    return torch.stack([a[t].sum() for t in range(len(x))]), torch.stack([r for r in x])


def stacked_twice(ctx: ANY, x: Tensor) -> ANY:
    hs = [x[t] * 2 for t in range(x.shape[0])]
    return torch.stack(hs), torch.stack(hs), torch.stack(hs, 1), torch.stack(hs[1:]), torch.stack(hs[::-1])


def pieces(ctx: ANY, x: Tensor) -> ANY:
    chunks = x.split(1)
    h = torch.zeros_like(chunks[0])
    for c in chunks:
        h = h * 0.5 + c
    return h


def views_of_its_own(ctx: ANY, x: Tensor) -> ANY:
    h = x[0]
    for t in range(x.shape[0]):
        h = (h + x[t]).view(-1)
        k = h.view(2, 2)
    return k, h


def filled_by_pairs(ctx: ANY, x: Tensor) -> ANY:
    out = x.new_zeros(x.shape[0], 2, x.shape[1])
    for t in range(x.shape[0]):
        out[t, 0] = x[t]
        out[t, 1] = x[t] * 2
    return out


def summed_in_place(ctx: ANY, x: Tensor) -> ANY:
    x = x.clone()
    for t in range(1, x.shape[0]):
        x[t] += x[t - 1]
    return x


def accumulated(ctx: ANY, x: Tensor) -> ANY:
    total = torch.zeros_like(x[0])
    for t in range(x.shape[0]):
        total += x[t] * t
        total.mul_(0.5)
    return total


def shapes_of_memory(x: Tensor, results: Any) -> list[Any]:
    """Of each result whether it is a view, and where in the argument it begins."""
    results = results if isinstance(results, tuple) else (results,)
    start, memory = x.data_ptr(), x.untyped_storage().data_ptr()
    inside = [r.data_ptr() - start if r.untyped_storage().data_ptr() == memory else None for r in results]
    return [(r, r.stride(), r._is_view(), i) for r, i in zip(results, inside, strict=True)]


METHODS = (
    last_of_all, last_by_index, list_of_slices, stacked_again, stacked_twice, pieces, filled_by_pairs, summed_in_place,
    accumulated,
)  # fmt: skip


def captures_at(method: Callable[..., Any], lengths: tuple[int, ...]) -> list[int]:
    """Compares a method with eager at these lengths; the captures that each took."""
    members = {"forward": staticmethod(method), "backward": staticmethod(lambda ctx, *g: None)}
    cls: Any = type(method.__name__, (Function,), members)
    fast, captures = fusegrad.compile(cls), []
    for steps in lengths:
        x, before = torch.randn(steps, 4), fusegrad.stats()["captures"]
        found, expected = shapes_of_memory(x, fast.apply(x)), shapes_of_memory(x, cls.apply(x))
        captures.append(fusegrad.stats()["captures"] - before)
        for (a, *facts), (b, *expected_facts) in zip(found, expected, strict=True):
            assert torch.equal(a, b) and facts == expected_facts
        assert shared(found) == shared(expected)
    return captures


def shared(results: list[Any]) -> list[int]:
    """For each result the first that it shares memory with."""
    memory = [r.untyped_storage().data_ptr() for r, *_ in results]
    return [memory.index(m) for m in memory]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__name__)
def test_results_share_memory_as_in_eager(method: Callable[..., Any]) -> None:
    assert captures_at(method, (14, 19, 11)) == [1, 0, 0]


def test_results_that_share_what_a_step_made_are_traced_step_by_step() -> None:
    assert captures_at(views_of_its_own, (14, 19)) == [1, 1]


def every_other(ctx: ANY, x: Tensor) -> ANY:
    for t in range(0, x.shape[0], 16):
        last = x[t]
    return last


def test_a_loop_that_is_too_short_to_repeat_is_traced_at_each_length() -> None:
    assert captures_at(every_other, (14, 19, 40)) == [1, 1, 1]
