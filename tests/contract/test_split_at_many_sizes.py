"""T4: between segments that run as written sizes are symbols, or constants where a method takes them for that."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from side_by_side import both, leaf, same

import fusegrad

Function = torch.autograd.Function
CALLS: list[int] = []
RAMPS: dict[int, torch.Tensor] = {}


def told_at(cls, *sizes):
    """Outputs and gradients, and what was left outside."""
    CALLS.clear()
    RAMPS.clear()
    results = []
    for size in sizes:
        x, a = leaf(size), leaf(size, seed=1)
        y = cls.apply(x, a)
        results += [y, *torch.autograd.grad(y, (x, a), leaf(size, seed=2))]
    return results, len(CALLS), sorted(RAMPS)


def without_faults(cls, story, backend) -> None:
    """As eager, and by no mistake of ours that eager's answer stands in for."""
    fast = same(cls, story, backend, may=("forward", "backward"), flags=False)
    assert not [r.reason for r in fast._fusegrad.ledger.records.values() if r.code == "FG071"]


class AllAreConstants(Function):
    """forward has a constant for every size, so that the symbols of what numpy gave are the only ones."""

    @staticmethod
    def forward(x, a):
        scaled = x * torch.tensor([0.5] * x.shape[-1]) * a
        return torch.as_tensor(np.arctan(scaled.detach().numpy()))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, a = ctx.saved_tensors
        warnings.warn("slow path", UserWarning, stacklevel=2)
        return torch.cat([g[:1], g[1:] * 2]) * a, g * x


@both
def test_the_symbols_of_results_are_known_where_there_are_no_others(backend) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        without_faults(AllAreConstants, lambda cls: told_at(cls, 7, 7, 2, 1, 2, 7), backend)


class FillsBuffers(Function):
    """backward takes the size for a constant, behind a forward that is split."""

    @staticmethod
    def forward(x, a):
        CALLS.append(1)
        return x * a

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, a = ctx.saved_tensors
        if x.sum().item() > 1e6:
            return None, None
        made = torch.zeros_like(g)
        for i in range(g.shape[-1]):
            made[i] = g[i] * (i + 1)
        return made * a, g * x


@both
def test_a_backward_behind_a_split_forward_takes_each_size_for_a_constant(backend) -> None:
    without_faults(FillsBuffers, lambda cls: told_at(cls, 7, 2, 7, 2, 3, 3), backend)


class FillsATable(Function):
    @staticmethod
    def forward(x, a):
        CALLS.append(1)
        return x * a

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, a = ctx.saved_tensors
        if (key := g.shape[-1]) not in RAMPS:
            RAMPS[key] = torch.arange(key, dtype=torch.float32)
        return g * RAMPS[key] * a, g * x


@both
def test_a_backward_behind_a_split_forward_may_fill_a_table(backend) -> None:
    without_faults(FillsATable, lambda cls: told_at(cls, 7, 2, 7, 2, 3, 2), backend)


@both
def test_sizes_of_calls_whose_backward_comes_later(backend) -> None:
    """All forwards ran before a backward took its size for a constant."""

    def story(cls):
        CALLS.clear()
        calls = []
        for size in (7, 7, 2):
            x, a = leaf(size), leaf(size, seed=1)
            calls.append((cls.apply(x, a), (x, a)))
        return [torch.autograd.grad(y.sum(), given) for y, given in calls], len(CALLS)

    without_faults(FillsBuffers, story, backend)


def test_what_is_captured_for_other_sizes_is_on_record() -> None:
    fast = fusegrad.compile(FillsBuffers, backend="reference")
    calls = [(fast.apply(x, a), (x, a)) for x, a in ((leaf(n), leaf(n, seed=1)) for n in (7, 7, 2))]
    for y, given in calls:
        torch.autograd.grad(y.sum(), given)
    assert "other sizes" in fast._fusegrad.ledger.records["backward"].reason


class ShowsPart(Function):
    """The statement that asks for data returns a view of what nobody else sees."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x + sum(x.flatten().tolist()[:2]))[..., :1]

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g.expand(x.shape) * x


@both
def test_a_view_that_a_segment_returns_is_one_to_autograd(backend) -> None:
    fast = fusegrad.compile(ShowsPart, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for _ in range(4):
            users, mine = ShowsPart.apply(leaf(3, 8)), fast.apply(leaf(3, 8))
            assert (mine._is_view(), mine.stride()) == (users._is_view(), users.stride()) == (True, (8, 1))
            for y in (users, mine):
                with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
                    y.mul_(2)
    assert fast._fusegrad.ledger.records["forward"].status == "compiled"


class TurnsRound(Function):
    """As ShowsPart, a whole view."""

    @staticmethod
    def forward(x, a):
        y = x + sum(x.flatten().tolist()[:2])
        return y.transpose(0, -1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        _, a = ctx.saved_tensors
        return g.transpose(0, -1) * torch.tensor([0.5] * g.shape[-1]), g * a  # a graph for each size


@both
def test_a_view_is_one_where_the_call_is_finished_by_hand(backend) -> None:
    """At another size the segment has run before its graph turns out not to fit: what it returned is played back."""
    fast = fusegrad.compile(TurnsRound, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for size in (7, 7, 7, 2, 2, 3, 1, 5):
            users, mine = TurnsRound.apply(leaf(size), leaf(size)), fast.apply(leaf(size), leaf(size))
            assert (mine._is_view(), mine.stride()) == (users._is_view(), users.stride()) == (True, (1,))
            mine.sum().backward()
    assert fast._fusegrad.ledger.records["forward"].status == "compiled"


class CountsInBackward(Function):
    """forward asks for data, backward takes the sizes for constants; its first gradient has no history."""

    @staticmethod
    def forward(x, a):
        return x * 2 if x.sum() > 0 else x * 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, a = ctx.saved_tensors
        with torch.enable_grad():
            leaf_ = a.detach().requires_grad_()
            y = torch.tanh(leaf_) * leaf_
        (inner,) = torch.autograd.grad(y, leaf_, g)
        return inner / math.sqrt(inner.numel() + 1), g * x


@both
def test_what_has_no_history_has_none_at_other_sizes(backend) -> None:
    fast = fusegrad.compile(CountsInBackward, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for seed, rows in enumerate((3, 2, 3, 2, 5)):
            told = []
            for cls in (CountsInBackward, fast):
                x, a = leaf(rows, 4, seed=seed), leaf(rows, 4, seed=seed + 1)
                y = cls.apply(x, a)
                g = torch.ones_like(y).requires_grad_(seed > 0)
                first = torch.autograd.grad(y, (x, a), g, create_graph=seed > 0)
                second = torch.autograd.grad(first[1].sum(), (x, g)) if seed else ()
                told.append((first, second, [t.requires_grad for t in first]))
            (wanted, more, flags), (mine, mores, mine_flags) = told
            assert flags == mine_flags
            torch.testing.assert_close((*mine, *mores), (*wanted, *more))
    assert "FG071" not in {r.code for r in fast._fusegrad.ledger.records.values()}
