"""What type checkers know of compiled classes and functions: as much as of those that were written (`make types`)."""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor
from torch.autograd import Function

import fusegrad


@fusegrad.compile
class Scale(Function):
    """Keeps its class attributes, its methods, and that it is a class."""

    limit: float = 1.5

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.factor, None

    @classmethod
    def twice(cls, x: Tensor) -> Tensor:
        result: Tensor = cls.apply(x, 2.0)  # type: ignore[no-untyped-call]  # which torch leaves untyped
        return result


@fusegrad.compile(backend="reference", derive_jvp=False)
class Configured(Scale):
    pass


@fusegrad.compile
def swish(x: Tensor, beta: float = 1.0) -> Tensor:
    return x * torch.sigmoid(beta * x)


@fusegrad.compile(numerics="fast")
def cube(x: Tensor) -> Tensor:
    return x**3


Again = fusegrad.compile(Scale, fullgraph=True)

assert_type(Scale.limit, float)
assert_type(Scale.twice(torch.ones(3)), Tensor)
assert_type(Configured.twice(torch.ones(3)), Tensor)
assert_type(Again.limit, float)
assert_type(swish(torch.ones(3), beta=2.0), Tensor)
assert_type(cube(torch.ones(3)), Tensor)
assert_type(fusegrad.stats()["fallbacks"], int)


class Derived(Scale):
    """A compiled class is a base class, and an annotation."""


def called(function: type[Scale], x: Tensor) -> Tensor:
    return function.twice(x)


called(Derived, torch.ones(3))
swish("no tensor")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
