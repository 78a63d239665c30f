"""Compiled Functions as programs name them: for tests that send them to other processes."""

from __future__ import annotations

import torch
from torch.autograd import Function

import fusegrad


class Scaled(Function):
    """A gradient that is none of forward's: a process that runs another one is found out."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x * 2


Fast = fusegrad.compile(Scaled)
Options = fusegrad.compile(Scaled, backend="reference", traceable={"backward": True}, derive_jvp=False)


@fusegrad.compile
class Decorated(Scaled):
    pass


class Outer:
    Inner = fusegrad.compile(Scaled, dynamic=False)


def make() -> type:
    class Local(Scaled):
        pass

    return fusegrad.compile(Local)


class Layer(torch.nn.Module):
    def __init__(self, function: type) -> None:
        super().__init__()
        self.function, self.apply_function = function, function.apply
        self.w = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x * self.w) + self.apply_function(x)


def gradients(layer: torch.nn.Module) -> list[float]:
    """Of a few calls, so that the last ones go the shortest way there is."""
    for _ in range(8):
        x = torch.full((3,), 2.0, requires_grad=True)
        layer(x).sum().backward()
    compiled = layer.function._fusegrad.ledger.records["backward"].status == "compiled"
    return [*x.grad.tolist(), *layer.w.grad.tolist(), float(compiled)]
