"""`functools.cache` around what a method calls: the cache holds real tensors, and is asked at every call."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from side_by_side import BACKENDS, leaf
from torch import Tensor
from torch.autograd import Function

import fusegrad


@functools.lru_cache(maxsize=8)
def window(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.hann_window(size, dtype=dtype)


@functools.cache
def both_ways(size: int) -> tuple[Tensor, Tensor]:
    return window(size), window(size).flip(0)


@functools.cache
def with_a_number(size: int) -> tuple[Tensor, int]:
    return torch.arange(size).float(), 2 * size


@functools.cache
def number(size: int) -> int:
    return 2 * size + 1


@functools.cache
def noise(size: int) -> Tensor:
    return torch.randn(size)


@functools.cache
def total(t: Tensor) -> Tensor:
    return t.sum(-1, keepdim=True)


class Tables:
    @functools.lru_cache  # noqa: B019
    def table(self, size: int) -> Tensor:
        return torch.arange(size).float()

    @staticmethod
    @functools.cache
    def of_all(size: int) -> Tensor:
        return torch.arange(size).float() + 1


class More(Tables):
    """Finds what it calls in its base."""


TABLES, WEIGHT = Tables(), torch.rand(4)
CACHED = (window, both_ways, with_a_number, number, noise, total, Tables.table, Tables.of_all)


def halved(x: Tensor) -> Tensor:
    kept = window(4)
    kept.mul_(0.5)
    return x * kept.sum()


def halved_in_a_pair(x: Tensor) -> Tensor:
    kept, _ = both_ways(4)
    kept.mul_(0.5)
    return x * kept.sum()


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "of a size": lambda x: x * window(x.shape[-1]),
    "by keyword": lambda x: x * window(size=x.shape[-1], dtype=x.dtype),
    "around another": lambda x: x * both_ways(x.shape[-1])[0] + both_ways(4)[1].sum(),
    "a number beside it": lambda x: x * with_a_number(x.shape[-1])[0] * with_a_number(4)[1],
    "a number": lambda x: x * number(x.shape[-1]) * number(3),
    "of a tensor from outside": lambda x: x * total(WEIGHT),
    "of an argument": lambda x: x * total(x),
    "staticmethod": lambda x: x * Tables.of_all(x.shape[-1]),
    "staticmethod of a base": lambda x: x * More.of_all(4).sum() + TABLES.of_all(4).sum(),
}
AS_WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "method": lambda x: x * TABLES.table(x.shape[-1]),
    "drawn": lambda x: x * noise(x.shape[-1]),
    "written to": halved,
    "one of two written to": halved_in_a_pair,
}


def function_of(call: Callable[[Tensor], Tensor]) -> Any:
    class Cached(Function):
        @staticmethod
        def forward(ctx, x):
            return call(x)

        @staticmethod
        def backward(ctx, g):
            return call(g)

    return Cached


def story(cls: Any) -> list[Any]:
    """Sizes in turn, from empty caches."""
    empty()
    torch.manual_seed(0)
    seen: list[Any] = []
    for size in (4, 4, 6, 4, 6) if "4" not in cls.__doc__ else (4, 4, 4):
        x = leaf(3, size)
        out = cls.apply(x)
        seen += [out.detach().clone(), *torch.autograd.grad(out.sum(), x)]
    return seen


def empty() -> None:
    for function in CACHED:
        function.cache_clear()


def kept() -> list[Any]:
    """The tensors in all caches."""
    inside = [value for function in CACHED for held in gc.get_referents(function) for value in _all(held, 3)]
    return [value for value in inside if isinstance(value, Tensor)]


def _all(value: Any, depth: int) -> list[Any]:
    if depth == 0 or isinstance(value, Tensor | type) or callable(value):
        return [value]
    return [value, *(v for part in gc.get_referents(value) for v in _all(part, depth - 1))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*CALLS, *AS_WRITTEN])
def test_a_cached_function_is_eagers(name: str, backend: str) -> None:
    cls = function_of({**CALLS, **AS_WRITTEN}[name])
    cls.__doc__ = "4" if name in ("of a tensor from outside", "staticmethod of a base", "around another") else ""
    fast = fusegrad.compile(cls, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for mine, theirs in zip(story(fast), story(cls), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0 if backend == "reference" else 1e-6, atol=1e-6)
        story(fast)
    assert all(type(t) is Tensor for t in kept())
    written = {m for m, r in fast._fusegrad.ledger.records.items() if r.status == "opaque"}
    written |= {call.method for call in fast._fusegrad.ledger.opaque_calls}
    assert written == ({"forward", "backward"} if name in AS_WRITTEN else set())
    assert "of_all" in vars(Tables) and "of_all" not in vars(More) and isinstance(vars(Tables)["of_all"], staticmethod)


@pytest.mark.parametrize("name", CALLS)
def test_under_torch_func_from_the_first_call_on(name: str) -> None:
    empty()
    call = CALLS[name]
    fast = fusegrad.compile(function_of(call))
    xs = torch.rand(3, 2, 4)
    for _ in range(2):
        found = torch.func.vmap(torch.func.grad(lambda x: fast.apply(x).sum()))(xs)
        torch.testing.assert_close(found, torch.stack([call(torch.ones(2, 4)) for _ in xs]))
    assert "torch.func" not in fast._fusegrad.ledger.records
    assert all(type(t) is Tensor for t in kept())


def test_a_cache_that_is_cleared_is_filled_again() -> None:
    """What is computed between two clears is what the function computes then."""
    scale = [2.0]

    @functools.cache
    def factor() -> Tensor:
        return torch.tensor(scale[0])

    fast = fusegrad.compile(function_of(lambda x: x * factor()))
    x = leaf(3)
    for value in (2.0, 2.0, 5.0):
        scale[0] = value
        torch.testing.assert_close(fast.apply(x), x * factor())
    factor.cache_clear()
    torch.testing.assert_close(fast.apply(x), x * 5.0)
