"""A method may fill a cache of its package: it holds real tensors, whatever a capture saw; the method is compiled."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import fusegrad

TABLE: dict[Any, Tensor] = {}
LISTED: list[Any] = []


class Store:
    def __init__(self) -> None:
        self.windows: dict[Any, Tensor] = collections.OrderedDict()


STORE = Store()


def by_pair(x: Tensor) -> Tensor:
    if (x.shape[-1], x.device) not in TABLE:
        TABLE[x.shape[-1], x.device] = torch.hann_window(x.shape[-1])
    return TABLE[x.shape[-1], x.device]


def by_size(x: Tensor) -> Tensor:
    size = x.shape[-1]
    if size not in STORE.windows:
        STORE.windows[size] = torch.hann_window(size)
    return STORE.windows[size]


def by_nested(x: Tensor) -> Tensor:
    inner = TABLE.setdefault("inner", {})  # type: ignore[arg-type]
    if x.dtype not in inner:  # type: ignore[operator]
        inner[x.dtype] = torch.hann_window(4)  # type: ignore[index]
    return inner[x.dtype]  # type: ignore[index]


def table() -> dict[Any, Tensor]:
    return TABLE


def by_a_call(x: Tensor) -> Tensor:
    if "window" not in table():
        table()["window"] = torch.hann_window(4)
    return table()["window"]


def listed(x: Tensor) -> Tensor:
    kept = [LISTED][0]
    if not kept:
        kept += [torch.hann_window(4)]
    return kept[0]


WAYS: dict[str, Callable[[Tensor], Tensor]] = {f.__name__: f for f in (by_pair, by_size, by_nested, by_a_call, listed)}


def function_of(window: Callable[[Tensor], Tensor]) -> Any:
    class Windowed(Function):
        @staticmethod
        def forward(ctx, x):
            w = window(x)
            ctx.save_for_backward(w)
            return x * w

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    return Windowed


@pytest.fixture(autouse=True)
def empty() -> None:
    for container in (TABLE, LISTED, STORE.windows):
        container.clear()  # type: ignore[attr-defined]


def kept() -> list[Any]:
    inner = [v for value in TABLE.values() if isinstance(value, dict) for v in value.values()]
    return [*(v for v in TABLE.values() if not isinstance(v, dict)), *inner, *LISTED, *STORE.windows.values()]


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("way", WAYS)
def test_a_cache_holds_what_eager_puts_there(way: str, backend: str) -> None:
    cls = function_of(WAYS[way])
    fast = fusegrad.compile(cls, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for size in (4, 4, 5, 4, 5) if way in ("by_pair", "by_size") else (4, 4, 4):
            x, g = torch.rand(3, size, requires_grad=True), torch.rand(3, size)
            out = fast.apply(x)
            assert all(type(t) is Tensor for t in kept()) and kept()
            torch.testing.assert_close(out, x * torch.hann_window(size))
            torch.testing.assert_close(torch.autograd.grad(out, x, g)[0], g * torch.hann_window(size))
    keys = [k for table in (TABLE, STORE.windows) for k in table]  # type: ignore[attr-defined]
    assert not any(isinstance(part, torch.SymInt) for k in keys for part in (k if isinstance(k, tuple) else (k,)))


@pytest.mark.parametrize("way", ["by_pair", "by_size"])
def test_a_cache_that_the_method_shows_leaves_the_rest_compiled(way: str) -> None:
    fast = fusegrad.compile(function_of(WAYS[way]))
    with pytest.warns(fusegrad.FallbackWarning, match="is split: it changes"):
        for _ in range(3):
            x = torch.rand(3, 4, requires_grad=True)
            fast.apply(x).sum().backward()
    records = fast._fusegrad.ledger.records
    assert records["forward"].status == records["backward"].status == "compiled"
