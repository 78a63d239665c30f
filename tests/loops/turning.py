"""Classes whose loops do something that no short one shows: in step 30, in forward or in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

ANY = Any
TURN = 30


class ForwardTurns(Function):
    """A number that depends on the step is no part of a trace."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for t in range(len(x)):
            h = torch.sin(h) + x[t]
            h = -h if t == TURN else h
        ctx.save_for_backward(x)
        return h

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        (x,), grads = ctx.saved_tensors, []
        for t in range(len(x)):
            g = g * torch.cos(x[t])
            grads.append(g)
        return torch.stack(grads)


class BackwardTurns(Function):
    """The same in backward."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for t in range(len(x)):
            h = torch.sin(h) + x[t]
        ctx.save_for_backward(x)
        return h

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        (x,), grads = ctx.saved_tensors, []
        for t in range(len(x)):
            g = g * torch.cos(x[t])
            grads.append(-g if t == TURN else g)
        return torch.stack(grads)


TURNING = (ForwardTurns, BackwardTurns)
