"""A backward that has no graph: it runs once, unpacks once, and leaves no history where none is asked for."""

from __future__ import annotations

import math
import types

import pytest
import torch
from side_by_side import both, leaf, same
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
Function = torch.autograd.Function
TIMES = [0]


class Counts(Function):
    @staticmethod
    def forward(ctx, x, a):
        ctx.save_for_backward(x)
        return x * a

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        TIMES[0] += 1
        return g * TIMES[0], g * x


class Draws(Function):
    @staticmethod
    def forward(ctx, x, a):
        ctx.save_for_backward(x)
        ctx.generator = torch.Generator().manual_seed(3)
        return x * a

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.rand(g.shape, generator=ctx.generator), g * x


class KeepsANamespace(Function):
    """Neither method has a graph, which is known before anything is unpacked."""

    @staticmethod
    def forward(ctx, x, a):
        ctx.save_for_backward(x, a)
        ctx.kept = types.SimpleNamespace(a=a)
        return x * a

    @staticmethod
    def backward(ctx, g):
        x, _ = ctx.saved_tensors
        return g * ctx.kept.a, g * x


class LeavesTorch(Function):
    """Neither method has a graph; of backward that is known when it was captured, on what was unpacked."""

    @staticmethod
    def forward(ctx, x, a):
        ctx.save_for_backward(x, a)
        return torch.from_numpy(x.detach().numpy() * a.detach().numpy())

    @staticmethod
    def backward(ctx, g):
        x, a = ctx.saved_tensors
        return torch.from_numpy(g.detach().numpy() * a.detach().numpy()), g * x


@both
@pytest.mark.parametrize("cls", [Counts, Draws], ids=lambda c: c.__name__)
def test_17_a_double_backward_runs_what_has_no_graph_once(cls, backend) -> None:
    def story(cls):
        TIMES[0] = 0
        told = []
        for _ in range(2):
            x, a = leaf(5), leaf(5, seed=1)
            g = leaf(5, seed=2)
            first = torch.autograd.grad(cls.apply(x, a), (x, a), g, create_graph=True)
            second = torch.autograd.grad(first, (x, g), [torch.ones(5), torch.ones(5)])
            told += [f.detach() for f in first] + [(s.detach(), s.requires_grad, s.grad_fn is None) for s in second]
        return told, TIMES[0]

    same(cls, story, backend, may=("forward", "backward", "torch.func"), flags=False)


@both
@pytest.mark.parametrize("cls", [KeepsANamespace, LeavesTorch], ids=lambda c: c.__name__)
def test_12_what_runs_as_written_unpacks_as_often_as_it_asks(cls, backend) -> None:
    """A checkpoint lets what it recomputed be unpacked once."""

    def story(cls):
        x, a, unpacked = leaf(5), leaf(5, seed=1), []
        out = checkpoint(cls.apply, x, a, use_reentrant=False)
        gradients = torch.autograd.grad(out.sum(), (x, a))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: (unpacked.append(1), t)[1]):
            out = cls.apply(x, a)
        return gradients, torch.autograd.grad(out.sum(), (x, a)), len(unpacked)

    same(cls, story, backend, may=("forward", "backward", "torch.func"), flags=False)


class CountsWhatItAskedFor(Function):
    """What is left on ctx comes after a question about data: of that no scan knows whether it is reached."""

    @staticmethod
    def forward(ctx, x, a):
        ctx.save_for_backward(x)
        ctx.calls = 0
        return x * a

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        assert torch.isfinite(g).all()
        TIMES[0] += 1
        ctx.calls += 1
        return g * ctx.calls, g * x


@both
def test_19_what_backward_leaves_on_ctx_behind_a_question_about_data_it_leaves_once(backend) -> None:
    def story(cls):
        TIMES[0] = 0
        x, a = leaf(5), leaf(5, seed=1)
        out = cls.apply(x, a)
        told = [torch.autograd.grad(out.sum(), (x, a), retain_graph=True) for _ in range(3)]
        return told, TIMES[0], out.grad_fn.calls

    may = ("forward", "backward", "attributes of grad_fn")
    same(CountsWhatItAskedFor, story, backend, may=may, flags=False)


class Ramp(Function):
    """A loop along an axis, whose size its capture takes for a constant, of two arguments that are of one shape."""

    @staticmethod
    def forward(x, a):
        return x * a

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, _ = ctx.saved_tensors
        ramp = torch.zeros_like(g)
        for i in range(g.shape[-1]):
            ramp[..., i] = g[..., i] * (i + 1)
        return ramp, g * x


@both
def test_17_a_backward_that_takes_a_size_for_a_constant_is_captured_for_each(backend) -> None:
    def story(cls):
        told = []
        for size in (4, 6, 4):
            x, a, g = leaf(size), leaf(size, seed=1), leaf(size, seed=2)
            first = torch.autograd.grad(cls.apply(x, a), (x, a), g, create_graph=True)
            told += [first, torch.autograd.grad(first, (x, g), [torch.ones(size)] * 2)]
        return told

    same(Ramp, story, backend, flags=False)


class Scaled(Function):
    """The first gradient has no history in eager, whichever capture it comes from."""

    @staticmethod
    def forward(ctx, x, a):
        ctx.save_for_backward(x)
        return x * a

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        w = torch.empty_like(g)
        w.data.copy_(g)
        return w / math.sqrt(w.numel() + 1), g * x


@both
def test_17_what_has_no_history_has_none_at_other_sizes(backend) -> None:
    def story(cls):
        told = []
        for size in (4, 6):
            x, a, g = leaf(size), leaf(size, seed=1), leaf(size, seed=2)
            first = torch.autograd.grad(cls.apply(x, a), (x, a), g, create_graph=True)
            told.append([(f.detach(), f.requires_grad) for f in first])
        return told

    same(Scaled, story, backend, flags=False)
