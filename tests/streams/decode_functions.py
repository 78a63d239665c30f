"""Function classes of a few queries against a long cache of keys, as users write them in plain PyTorch.

`CASES` lists every class with the arguments behind queries, keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

Tensor = torch.Tensor
INF = float("inf")


@dataclass(frozen=True)
class Case:
    """A class, the heads of its keys, and what makes its further arguments: (heads, keys) -> arguments."""

    cls: type
    more: Callable[[int, int], tuple[Any, ...]]
    grouped: bool = False

    @property
    def name(self) -> str:
        return self.cls.__name__

    def arguments(self, queries: int, keys: int, dtype: torch.dtype = torch.float32, d: int = 16) -> tuple[Any, ...]:
        """One sample of two heads of queries, floats that ask for gradients, the same ones each time."""
        with torch.random.fork_rng():
            torch.manual_seed(7)
            k_heads = 1 if self.grouped else 2
            q, k, v = (torch.randn(1, h, n, d) for h, n in ((2, queries), (k_heads, keys), (k_heads, keys)))
            floats = (a.to(dtype).requires_grad_() for a in (q, k, v))
            return (*floats, *(_placed(a, dtype) for a in self.more(2, keys)))


def _placed(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype).requires_grad_() if is_float else value


def places(s: Tensor) -> tuple[Tensor, Tensor]:
    """The places of queries, which are the last of the sequence, and of keys."""
    n, m = s.shape[-2:]
    return torch.arange(n, device=s.device)[:, None] + (m - n), torch.arange(m, device=s.device)


def gradients(q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of the queries, keys and values of an attention with these probabilities."""
    dp = g @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ g


class GroupedLength(Function):
    """Heads of a group share their keys; how many keys there are is in memory."""

    @staticmethod
    def probabilities(q, k, length, scale):
        s = (q @ k.mT) * scale
        return torch.softmax(torch.where(torch.arange(k.shape[-2], device=k.device) < length, s, -INF), -1)

    @staticmethod
    def grouped(x, k):
        return x.reshape(x.shape[0], k.shape[1], x.shape[1] // k.shape[1], *x.shape[2:])

    @staticmethod
    def forward(ctx, q, k, v, length, scale):
        ctx.save_for_backward(q, k, v, length)
        ctx.scale = scale
        queries = GroupedLength.grouped(q, k)
        p = GroupedLength.probabilities(queries, k[:, :, None], length[:, None, None, None, None], scale)
        return (p @ v[:, :, None]).reshape(q.shape)

    @staticmethod
    def backward(ctx, g):
        q, k, v, length = ctx.saved_tensors
        queries, given = GroupedLength.grouped(q, k), GroupedLength.grouped(g, k)
        p = GroupedLength.probabilities(queries, k[:, :, None], length[:, None, None, None, None], ctx.scale)
        dq, dk, dv = gradients(queries, k[:, :, None], v[:, :, None], p, given, ctx.scale)
        return dq.reshape(q.shape), dk.sum(2), dv.sum(2), None, None


class CausalAlibi(Function):
    """Causal from the end of the cache, with a slope for each head and a length in memory."""

    @staticmethod
    def probabilities(q, k, slopes, length, scale):
        s = (q @ k.mT) * scale
        i, j = places(s)
        biased = s + (slopes[:, None, None] * (j - i)).to(s.dtype)
        return torch.softmax(torch.where((j <= i) & (j < length), biased, -INF), -1)

    @staticmethod
    def forward(ctx, q, k, v, slopes, length, scale):
        ctx.save_for_backward(q, k, v, slopes, length)
        ctx.scale = scale
        return CausalAlibi.probabilities(q, k, slopes, length, scale) @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v, slopes, length = ctx.saved_tensors
        p = CausalAlibi.probabilities(q, k, slopes, length, ctx.scale)
        return *gradients(q, k, v, p, g, ctx.scale), None, None, None


class Sink(Function):
    """One more logit for each head in the denominator: without any key, it is all that there is."""

    @staticmethod
    def probabilities(q, k, sink, length, scale):
        s = torch.where(torch.arange(k.shape[-2], device=k.device) < length, (q @ k.mT) * scale, -INF)
        sink = sink[:, None, None]
        m = torch.maximum(s.amax(-1, keepdim=True), sink)
        e = torch.exp(s - m)
        return e / (e.sum(-1, keepdim=True) + torch.exp(sink - m))

    @staticmethod
    def forward(ctx, q, k, v, sink, length, scale):
        ctx.save_for_backward(q, k, v, sink, length)
        ctx.scale = scale
        return Sink.probabilities(q, k, sink, length, scale) @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v, sink, length = ctx.saved_tensors
        p = Sink.probabilities(q, k, sink, length, ctx.scale)
        return *gradients(q, k, v, p, g, ctx.scale), None, None, None


class Sigmoid(Function):
    """No row is normalised."""

    @staticmethod
    def weights(q, k, length, scale, shift):
        s = (q @ k.mT) * scale + shift
        return torch.where(torch.arange(k.shape[-2], device=k.device) < length, torch.sigmoid(s), 0.0)

    @staticmethod
    def forward(ctx, q, k, v, length, scale, shift):
        ctx.save_for_backward(q, k, v, length)
        ctx.scale, ctx.shift = scale, shift
        return Sigmoid.weights(q, k, length, scale, shift) @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v, length = ctx.saved_tensors
        p = Sigmoid.weights(q, k, length, ctx.scale, ctx.shift)
        ds = (g @ v.mT) * p * (1 - p) * ctx.scale
        return ds @ k, ds.mT @ q, p.mT @ g, None, None, None


class Linear(Function):
    """Linear attention in its quadratic form: what is past fades."""

    @staticmethod
    def fading(x, rate):
        i, j = places(x)
        return torch.where(j <= i, x * torch.exp(rate * (j - i)).to(x.dtype), 0.0)

    @staticmethod
    def forward(ctx, q, k, v, rate):
        ctx.save_for_backward(q, k, v)
        ctx.rate = rate
        return Linear.fading(q @ k.mT, rate) @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v = ctx.saved_tensors
        w, ds = Linear.fading(q @ k.mT, ctx.rate), Linear.fading(g @ v.mT, ctx.rate)
        return ds @ k, ds.mT @ q, w.mT @ g, None


def whole(heads: int, keys: int) -> Tensor:
    return torch.tensor([keys - 5])


CASES = [
    Case(GroupedLength, lambda h, n: (whole(h, n), 0.25), grouped=True),
    Case(CausalAlibi, lambda h, n: (torch.tensor([0.5, 0.01]), whole(h, n), 0.25)),
    Case(Sink, lambda h, n: (torch.randn(h), whole(h, n), 0.25)),
    Case(Sigmoid, lambda h, n: (whole(h, n), 0.25, -math.log(n))),
    Case(Linear, lambda h, n: (0.01,)),
]


def named(name: str) -> Case:
    return next(c for c in CASES if c.name == name)
