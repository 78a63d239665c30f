"""What is on ctx and is the caller's, too: the very object, as it is when backward runs."""

from __future__ import annotations

import gc
import types
import warnings
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad

both = pytest.mark.parametrize("backend", ["reference", "interpret"])


class Config:
    def __init__(self) -> None:
        self.k = 1.0


class Keeps(Function):
    @staticmethod
    def forward(ctx, x, meta, config, rows):
        ctx.meta, ctx.config, ctx.row = meta, config, rows["first"]
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        for tensor in ctx.meta.get("tensors", ()):
            g = g * tensor
        return g * x * (1 + len(ctx.meta)) * ctx.config.k * sum(ctx.row), None, None, None


def nothing(meta, config, rows) -> None: ...


def fills(meta, config, rows) -> None:
    meta["more"] = 1.0


def sets(meta, config, rows) -> None:
    config.k = 7.0


def appends(meta, config, rows) -> None:
    rows["first"].append(5.0)


def exchanges(meta, config, rows) -> None:
    meta["tensors"] = [torch.full((3,), 11.0)]


def outcome(cls: Any, change: Any) -> list[Any]:
    x = torch.arange(3.0, requires_grad=True)
    meta, config, rows = {"tensors": [torch.full((3,), 2.0)]}, Config(), {"first": [1.0, 2.0]}
    y = cls.apply(x, meta, config, rows)
    same = [y.grad_fn.meta is meta, y.grad_fn.config is config, y.grad_fn.row is rows["first"]]
    change(meta, config, rows)
    y.sum().backward(retain_graph=True)
    first = x.grad.tolist()
    fills(meta, config, rows)
    y.sum().backward()
    return [y.tolist(), first, x.grad.tolist(), same]


@both
@pytest.mark.parametrize("change", [nothing, fills, sets, appends, exchanges])
def test_backward_sees_what_the_caller_did_to_it(change, backend) -> None:
    fast = fusegrad.compile(Keeps, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for now in (nothing, nothing, nothing, nothing, change, nothing, change):
            assert outcome(fast, now) == outcome(Keeps, now)


def test_what_nobody_changes_runs_compiled() -> None:
    fast = fusegrad.compile(Keeps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.arange(3.0, requires_grad=True)
        for _ in range(5):
            fast.apply(x, {}, Config(), {"first": [1.0]}).sum().backward()
    assert {record.status for record in fusegrad.explain(fast).methods.values()} >= {"compiled"}


def test_a_cycle_through_the_object_goes_with_the_garbage() -> None:
    fast, meta = fusegrad.compile(Keeps), {}
    out = fast.apply(torch.ones(3, requires_grad=True), meta, Config(), {"first": [1.0]})
    meta["out"] = out
    reference = torch._C._WeakTensorRef(out)
    del meta, out
    gc.collect()
    assert reference.expired()


class OwnNamespace(Function):
    """Made by forward, a tensor in it; forward's results show whatever backward finds there."""

    @staticmethod
    def forward(ctx, x, k):
        ctx.kept = types.SimpleNamespace(twice=x * 2, k=k, inner=types.SimpleNamespace(x=x))
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * ctx.kept.twice * ctx.kept.k + ctx.kept.inner.x, None


class GivenNamespace(Function):
    @staticmethod
    def forward(ctx, x, space):
        ctx.space = space
        return x * space.w

    @staticmethod
    def backward(ctx, g):
        return g * ctx.space.w * ctx.space.k, None


@both
def test_a_namespace_that_forward_made(backend) -> None:
    fast = fusegrad.compile(OwnNamespace, backend=backend, fullgraph=True)
    for k in (2.0, 3.0):
        x, g = torch.rand(3, requires_grad=True), torch.rand(3)
        mine, theirs = fast.apply(x, k), OwnNamespace.apply(x, k)
        torch.testing.assert_close(torch.autograd.grad(mine, x, g), torch.autograd.grad(theirs, x, g))
        assert type(mine.grad_fn.kept) is types.SimpleNamespace and mine.grad_fn.kept.k == k
        assert mine.grad_fn.kept.inner.x is x


@both
@pytest.mark.parametrize("change", [lambda s: None, lambda s: setattr(s, "k", 5.0), lambda s: setattr(s, "w", s.w + 1)])
@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_a_namespace_that_was_given_is_the_callers(change, backend) -> None:
    fast = fusegrad.compile(GivenNamespace, backend=backend)
    for _ in range(4):
        found = []
        for cls in (fast, GivenNamespace):
            x, space = torch.arange(3.0, requires_grad=True), types.SimpleNamespace(w=torch.full((3,), 2.0), k=3.0)
            y = cls.apply(x, space)
            assert y.grad_fn.space is space
            change(space)
            found.append([y.detach(), *torch.autograd.grad(y.sum(), x)])
        torch.testing.assert_close(*found)


class ReadsOldSaved(GivenNamespace):
    @staticmethod
    def forward(ctx, x, space):
        ctx.save_for_backward(x)
        ctx.space = space
        return x * space.w

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_variables
        return g * x * ctx.space.w * ctx.space.k, None


@both
@pytest.mark.parametrize("kept", [{"k": 3.0}, {"k": 3.0, "more": types.SimpleNamespace(n=(1, 2))}])
def test_a_namespace_of_each_call_is_one_capture(kept, backend) -> None:
    fast = fusegrad.compile(GivenNamespace, backend=backend, fullgraph=True)
    for _ in range(4):
        space = types.SimpleNamespace(w=torch.full((3,), 2.0), **kept)
        x = torch.arange(3.0, requires_grad=True)
        fast.apply(x, space).sum().backward()
        assert x.grad.tolist() == [6.0, 6.0, 6.0]
    methods = fusegrad.explain(fast).methods
    assert methods["forward"].status == methods["backward"].status == "compiled"
    assert len(list(fast._fusegrad.table)) == 1


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning", "ignore::DeprecationWarning")
def test_a_backward_that_runs_as_written_has_the_saved_variables() -> None:
    fast = fusegrad.compile(ReadsOldSaved)
    for cls in (fast, ReadsOldSaved):
        x, space = torch.arange(3.0, requires_grad=True), types.SimpleNamespace(w=torch.full((3,), 2.0), k=3.0)
        y = cls.apply(x, space)
        space.k = 5.0
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [0.0, 10.0, 20.0], cls
