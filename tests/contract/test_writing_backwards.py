"""A backward that writes to what it is given: its second derivative is eager's, and its gradient can be written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from side_by_side import both, leaf, outcome
from torch.autograd import Function

import fusegrad


class IntoSaved(Function):
    @staticmethod
    def forward(ctx, x):
        e = x.exp()
        ctx.save_for_backward(e)
        return e.sum(-1)

    @staticmethod
    def backward(ctx, g):
        (e,) = ctx.saved_tensors
        e.sub_(0.5)
        return e.mul_(g.unsqueeze(-1))


class IntoGradient(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g.mul_(ctx.saved_tensors[0].cos())


class ReturnsView(Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 2).reshape(-1)

    @staticmethod
    def backward(ctx, g):
        return (g * 2).view(3, 4)


def story(cls: Any, write: bool) -> list[Any]:
    x = leaf(3, 4)
    y = cls.apply(x)
    weight = torch.ones_like(y.detach()).requires_grad_()
    (first,) = torch.autograd.grad(y, x, weight * 1, create_graph=True)
    if write:
        first.mul_(2.0)
    return [first.detach().clone(), *torch.autograd.grad(first.square().sum(), (x, weight), allow_unused=True)]


@both
@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
@pytest.mark.parametrize(("cls", "write"), [(IntoSaved, False), (IntoGradient, False), (ReturnsView, True)])
def test_18_second_derivatives_are_eagers(cls, write, backend) -> None:
    fast = fusegrad.compile(cls, backend=backend)
    theirs = outcome(lambda c: story(c, write), cls)
    for _ in range(2):
        mine = outcome(lambda c: story(c, write), fast)
        assert not isinstance(mine, Exception) and not isinstance(theirs, Exception), (mine, theirs)
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None) == (b is None)
            if b is not None:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


class AtFixedRows(Function):
    """The rows that it writes to fix a size, which is a symbol of the tensor that it writes to."""

    @staticmethod
    def forward(ctx, x):
        kept = x.exp()
        ctx.save_for_backward(kept)
        return kept.sum(-1)

    @staticmethod
    def backward(ctx, g):
        (kept,) = ctx.saved_tensors
        rows = kept.view(-1, 8)
        rows[torch.arange(3), torch.tensor([1, 2, 3])] -= 1
        return kept.mul_(g.unsqueeze(-1))


@both
def test_a_size_that_the_body_fixes_is_one_of_what_it_writes_to(backend) -> None:
    fast = fusegrad.compile(AtFixedRows, backend=backend)
    for create_graph in (True, False, True):
        told = []
        for cls in (AtFixedRows, fast):
            x = leaf(3, 8)
            y = cls.apply(x)
            told.append(torch.autograd.grad(y.sum(), x, create_graph=create_graph)[0])
        torch.testing.assert_close(told[1], told[0])
    assert "FG071" not in {r.code for r in fast._fusegrad.ledger.records.values()}


class UnseenByAutograd(Function):
    """It writes to what it saved, and no version counter tells."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y.sum()

    @staticmethod
    def backward(ctx, g):
        _, y = ctx.saved_tensors
        y.data.mul_(2)
        return g * y


class UnseenInNumpy(UnseenByAutograd):
    @staticmethod
    def backward(ctx, g):
        _, y = ctx.saved_tensors
        array = y.detach().numpy()
        array *= 2
        return g * y


class SeenByAutograd(UnseenByAutograd):
    @staticmethod
    def backward(ctx, g):
        _, y = ctx.saved_tensors
        y.mul_(2)
        return g * y


@both
@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
@pytest.mark.parametrize("cls", [UnseenByAutograd, UnseenInNumpy, SeenByAutograd])
def test_what_is_saved_is_written_to_again_by_a_second_backward(cls, backend) -> None:
    fast = fusegrad.compile(cls, backend=backend)
    for size in (3, 3, 3, 5, 5, 3, 3, 3, 3, 3):
        found = []
        for told in (cls, fast):
            x = torch.linspace(-1, 2, size, requires_grad=True)
            y, seen = told.apply(x), []
            for _ in range(3):
                try:
                    seen += torch.autograd.grad(y, x, retain_graph=True)
                except RuntimeError as error:
                    assert "modified by an inplace operation" in str(error), error
            found.append(seen)
        torch.testing.assert_close(found[1], found[0])
    assert len(found[0]) == (1 if cls is SeenByAutograd else 3)
    methods = fusegrad.explain(fast).methods
    assert methods["forward"].status == methods["backward"].status == "compiled"
