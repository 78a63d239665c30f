"""The table of loop Functions: each with its arguments for a number of steps and a width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LoopFunction:
    """A class and how it is called for t steps of width n.

    exact: backward is the derivative of forward, and not a surrogate of it. product: a step multiplies what it carries
    with a matrix. launches: of forward and backward. shortest: the fewest steps that it makes sense for.
    """

    cls: type
    make: Callable[[int, int], tuple[Any, ...]]
    exact: bool = True
    product: bool = False
    launches: tuple[int, int] = (1, 1)
    shortest: int = 1

    @property
    def name(self) -> str:
        return self.cls.__name__

    def arguments(self, steps: int, width: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
        """Arguments that are the same at every call; floats in the dtype, and leaves."""
        torch.manual_seed(steps)
        return tuple(_in(a, dtype) for a in self.make(steps, width))

    def plain(self, *args: Any) -> Any:
        """Forward as a plain function, whose backward is derived."""
        return self.cls.forward(_Forgets(), *args)  # type: ignore[attr-defined]


class _Forgets:
    """A ctx of which no backward asks anything."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keeps nothing."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Notes nothing."""

    def set_materialize_grads(self, value: bool) -> None:
        """Notes nothing."""


def _in(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(dtype).requires_grad_(value.requires_grad)


FUNCTIONS: list[LoopFunction] = []


def loop(make: Callable[[int, int], tuple[Any, ...]], **facts: Any) -> Callable[[type], type]:
    """Puts a class into the table."""

    def register(cls: type) -> type:
        FUNCTIONS.append(replace(LoopFunction(cls, make), **facts))
        return cls

    return register


def rand(*shape: int) -> Tensor:
    """Normal numbers that want a gradient."""
    return torch.randn(*shape, requires_grad=True)


def fixed(*shape: int) -> Tensor:
    """Normal numbers that want none."""
    return torch.randn(*shape)


def gates(*shape: int) -> Tensor:
    """Numbers from 0 to 1 that want a gradient."""
    return torch.rand(*shape).requires_grad_()


def weight(*shape: int) -> Tensor:
    """Numbers as of an initialised layer."""
    return (torch.randn(*shape) / shape[-1] ** 0.5).requires_grad_()
