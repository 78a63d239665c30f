"""Function classes with a loop in a loop, as users write them: over two sizes, or over a size and a fixed number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from loops.recurrences import gates, rand
from torch import Tensor
from torch.autograd import Function

ANY = Any


@dataclass(frozen=True)
class Nested:
    """A class and how it is called for T times S steps. loops: in each direction, those within loops included."""

    cls: type
    make: Callable[[int, int], tuple[Any, ...]]
    loops: tuple[int, int]

    @property
    def name(self) -> str:
        return self.cls.__name__


NESTED: list[Nested] = []


def nested(make: Callable[[int, int], tuple[Any, ...]], loops: tuple[int, int] = (2, 2)) -> Any:
    def register(cls: type) -> type:
        NESTED.append(Nested(cls, make, loops))
        return cls

    return register


@nested(lambda t, s: (gates(t, s, 3), rand(t, s, 3)))
class Rows(Function):
    """A recurrence along all rows, one row after the other."""

    @staticmethod
    def forward(ctx: ANY, a: Tensor, x: Tensor) -> Tensor:
        h, rows = torch.zeros_like(x[0, 0]), []
        for t in range(x.shape[0]):
            row = []
            for s in range(x.shape[1]):
                h = a[t, s] * h + x[t, s]
                row.append(h)
            rows.append(torch.stack(row))
        out = torch.stack(rows)
        ctx.save_for_backward(a, out)
        return out

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        a, out = ctx.saved_tensors
        carry, gxs = torch.zeros_like(g[0, 0]), []
        for t in reversed(range(g.shape[0])):
            row = []
            for s in reversed(range(g.shape[1])):
                carry = carry + g[t, s]
                row.append(carry)
                carry = carry * a[t, s]
            gxs.append(torch.stack(row[::-1]))
        gx = torch.stack(gxs[::-1])
        flat = out.flatten(0, 1)
        before = torch.cat([torch.zeros_like(flat[:1]), flat[:-1]]).view_as(out)
        return gx * before, gx


@nested(lambda t, s: (gates(t, s, 3), rand(t, s, 3)))
class Batches(Function):
    """A recurrence for each sample by itself: nothing goes from one to the next."""

    @staticmethod
    def forward(ctx: ANY, a: Tensor, x: Tensor) -> Tensor:
        rows = []
        for b in range(x.shape[0]):
            h, row = torch.zeros_like(x[0, 0]), []
            for s in range(x.shape[1]):
                h = a[b, s] * h + x[b, s]
                row.append(h)
            rows.append(torch.stack(row))
        out = torch.stack(rows)
        ctx.save_for_backward(a, out)
        return out

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        a, out = ctx.saved_tensors
        gxs = []
        for b in range(g.shape[0]):
            carry, row = torch.zeros_like(g[0, 0]), []
            for s in reversed(range(g.shape[1])):
                carry = carry + g[b, s]
                row.append(carry)
                carry = carry * a[b, s]
            gxs.append(torch.stack(row[::-1]))
        gx = torch.stack(gxs)
        before = torch.cat([torch.zeros_like(out[:, :1]), out[:, :-1]], 1)
        return gx * before, gx


@nested(lambda t, s: (rand(t, 4), rand(s, 4, 4)), loops=(2, 1))
class Layers(Function):
    """Many small layers, in each step of time."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, w: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for xt in x:
            h = h + xt
            for ws in w:
                h = torch.tanh(h @ ws)
        ctx.save_for_backward(x, w)
        return h

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        x, _ = ctx.saved_tensors
        return torch.stack([g * t for t in range(x.shape[0])]), None


@nested(lambda t, s: (rand(t, 3), rand(s, 3)), loops=(2, 0))
class Inner(Function):
    """Twenty steps of an iteration in each step of time; then a loop over another size."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, y: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            for _ in range(20):
                h = torch.tanh(h) + x[t]
        for s in range(y.shape[0]):
            h = h * y[s]
        return h

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        return None, None


@nested(lambda t, s: (rand(t, 3), rand(s, 3)), loops=(2, 1))
class InARow(Function):
    """A loop over one size, then over another."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, y: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            h = torch.tanh(h) + x[t]
        for s in range(y.shape[0]):
            h = h * y[s]
        ctx.save_for_backward(y)
        return h

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        (y,) = ctx.saved_tensors
        gs = []
        for s in range(y.shape[0]):
            gs.append(g)
            g = g * y[s]
        return None, torch.stack(gs)


@nested(lambda t, s: (rand(t, 3),), loops=(3, 0))
class Outer(Function):
    """The same sequence three times over."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for _ in range(3):
            for t in range(x.shape[0]):
                h = torch.tanh(h) + x[t]
        return h

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        return None


@nested(lambda t, s: (rand(t + s, 3), rand(t, s)), loops=(3, 4))
class Shifted(Function):
    """An index that both steps are in."""

    @staticmethod
    def forward(ctx: ANY, x: Tensor, w: Tensor) -> Tensor:
        steps, taps = w.shape
        found, total = torch.zeros_like(x[0]), torch.zeros_like(x[0])
        for t in range(steps):
            for s in range(taps):
                total = 0.5 * total + w[t, s] * x[t + s]
            found = found + total * (t + 1)
        ctx.save_for_backward(x, w)
        return found

    @staticmethod
    def backward(ctx: ANY, g: Tensor) -> ANY:
        _, w = ctx.saved_tensors
        steps, taps = w.shape
        h, hs = torch.zeros_like(g), []
        for t in reversed(range(steps)):
            h = h + g * (t + 1)
            for _ in reversed(range(taps)):
                hs.append(h)
                h = 0.5 * h
        return None, (torch.stack(hs[::-1]).view(steps, taps, -1) * g).sum(-1)
