"""What a method reads by way of class methods, numbers of tensors, methods of objects: each call sees it as it is.

Each row is an expression that both methods ask for, while what it comes to changes between two calls.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import Function

import fusegrad

Tensor = torch.Tensor
TOLD, ARRAY, MANY = torch.tensor([3.0]), np.array([3.0]), collections.Counter(k=3)
SCHEDULE = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)], lr=1.0))


class Held(Function):
    k = 3.0


class Kind(type):
    k = 3.0

    @property
    def of_kind(cls) -> float:
        return Kind.k

    def __getitem__(cls, _: Any) -> float:
        return Kind.k


class OfKind(metaclass=Kind):
    pass


def k_of(cls: Any) -> Any:
    return cls.k


READ: dict[str, Callable[[], Any]] = {
    "item of a tensor": lambda: TOLD.item(),
    "tolist of a tensor": lambda: TOLD.tolist()[0],
    "numpy of a tensor": lambda: float(TOLD.numpy()[0]),
    "float of a tensor": lambda: float(TOLD),
    "a method of an array": lambda: float(ARRAY.max()),
    "a method of a container of Python's": lambda: MANY.most_common(1)[0][1],
    "a method of an object of torch's": lambda: SCHEDULE.get_last_lr()[0],
    "getattr of a Function": lambda: getattr(Held, "k"),  # noqa: B009
    "vars of a Function": lambda: vars(Held)["k"],
    "a Function that is handed on": lambda: k_of(Held),
    "a property of a metaclass": lambda: OfKind.of_kind,  # type: ignore[attr-defined]
    "an index of a class": lambda: OfKind[0],  # type: ignore[index]
    "a module by name": lambda: __import__("math").k,
}


def unset() -> None:
    del math.k  # type: ignore[attr-defined]


def put(k: int) -> None:
    TOLD.fill_(k)
    ARRAY[0] = MANY["k"] = Held.k = Kind.k = math.k = k  # type: ignore[attr-defined]
    SCHEDULE._last_lr = [float(k)]


@pytest.mark.parametrize("way", READ)
def test_what_is_read_in_a_roundabout_way_is_read_at_every_call(way: str) -> None:
    read = READ[way]

    class Scaled(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * read()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * read()

    fast, x = fusegrad.compile(Scaled), torch.ones(2, requires_grad=True)
    for k in (3, 3, 3, 10, 10, 3, 10):
        put(k)
        y = fast.apply(x)
        assert y.tolist() == [k, k]
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [k, k]
    unset()
