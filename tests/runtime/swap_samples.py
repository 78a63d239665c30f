"""A model to swap modules of, and replacements; by names that a pickle finds."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from fusegrad.examples.gallery.rms_norm import RMSNorm
from fusegrad.examples.gallery.swiglu import SwiGLU


def doubled(y: torch.Tensor) -> torch.Tensor:
    return y * 2


def tripled(y: torch.Tensor) -> torch.Tensor:
    return y * 3


class Norm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width) + 0.5), eps
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight

    def label(self) -> str:
        return f"norm of {self.weight.numel()}"


class Gate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Net(nn.Module):
    """A norm under two names, two gates, and a function that its forward names globally."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gates = Norm(8), nn.Sequential(Gate(8), Gate(8))
        self.tied = self.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return doubled(self.tied(self.gates(self.norm(x))))


def passed_on(function: Any) -> Any:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return called


wrapped_twice = passed_on(passed_on(Net.forward))


class FastNorm:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return RMSNorm.apply(x, self.weight, self.eps)


def fast_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return RMSNorm.apply(x, self.weight, self.eps)


class FastGate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gated(x))

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return SwiGLU.apply(self.gate(x), self.up(x))
