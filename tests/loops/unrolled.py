"""Function classes whose loops are no loops of the graph: traced step by step, each with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from loops.recurrences import rand
from torch import Tensor
from torch.autograd import Function

ANY = Any


@dataclass(frozen=True)
class Stepwise:
    """A class, how it is called for T steps, and the reason why the loop of a method stays unrolled."""

    cls: type
    make: Callable[[int], tuple[Any, ...]]
    reason: str
    method: str = "forward"

    @property
    def name(self) -> str:
        return self.cls.__name__


STEPWISE: list[Stepwise] = []


def stepwise(make: Callable[[int], tuple[Any, ...]], reason: str, method: str = "forward") -> Any:
    def register(cls: type) -> type:
        STEPWISE.append(Stepwise(cls, make, reason, method))
        return cls

    return register


@stepwise(lambda t: (rand(t, 3),), "its steps are not the same ones each time")
class Products(Function):
    """A float that is carried from step to step by Python, of no form that is known."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor) -> Tensor:
        total, decay = torch.zeros_like(x[0]), 1.0
        for t in range(x.shape[0]):
            total = total + x[t] * decay
            decay *= 0.9
        return total

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        return None


@stepwise(lambda t: (rand(t, 3),), "its steps are not the same ones each time")
class Triangle(Function):
    """Each step reads all before it."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor) -> Tensor:
        hs = [x[0]]
        for t in range(1, x.shape[0]):
            hs.append(x[t] + torch.stack(hs).mean(0))
        return torch.stack(hs)

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        return g


@stepwise(lambda t: (rand(t, 3),), "shapes", "forward")
class Growing(Function):
    """A slice that grows with the step."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            h = h + x[: t + 1].sum(0)
        return h

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        return None


@stepwise(lambda t: (rand(t, 3),), "unrolled again at another length it is not the method")
class EverySeventh(Function):
    """Every seventh step does something else: turns are no longer than four steps."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            h = torch.sin(h) + x[t] if t % 7 else torch.cos(h) * x[t]
        return h

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        return None
