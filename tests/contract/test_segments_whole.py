"""A value that no graph can hand on exists in one segment alone: from where it is bound to where it is read last."""

from __future__ import annotations

import collections
import random
import warnings

import numpy as np
import pytest
import torch
from side_by_side import both, leaf
from torch.autograd import Function

import fusegrad


class Masked(Function):
    @staticmethod
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        return g * mask


class OwnGenerator(Masked):
    @staticmethod
    def forward(ctx, x):
        y = x.sin()
        rng = torch.Generator(device=x.device)
        rng.manual_seed(x.shape[0])
        first = torch.rand(x.shape, generator=rng)
        z = y.exp()
        mask = first + torch.rand(x.shape, generator=rng)
        ctx.save_for_backward(mask)
        return z * mask


class OwnGeneratorInALoop(Masked):
    @staticmethod
    def forward(ctx, x):
        rng, drawn = torch.Generator().manual_seed(1), []
        for _ in range(3):
            drawn.append(torch.rand(x.shape, generator=rng))
        mask = sum(drawn)
        ctx.save_for_backward(mask)
        return x.sin() * mask


class OwnGeneratorInABranch(Masked):
    @staticmethod
    def forward(ctx, x):
        if x.dim() > 1:
            rng = torch.Generator().manual_seed(1)
            scale = torch.rand((), generator=rng)
        else:
            scale = torch.ones(())
        mask = scale.expand(x.shape).cos()
        ctx.save_for_backward(mask)
        return x.sin() * mask


class OfNumpy(Masked):
    @staticmethod
    def forward(ctx, x):
        y = x.sin()
        rng = np.random.RandomState(3)
        noise = rng.rand(*x.shape).astype(np.float32)
        mask = torch.from_numpy(noise)
        ctx.save_for_backward(mask)
        return y * mask


class OfPython(Masked):
    @staticmethod
    def forward(ctx, x):
        rng = random.Random(5)
        y = x.sin() * rng.random()
        mask = torch.full_like(x, rng.gauss(0, 1))
        ctx.save_for_backward(mask)
        return y * mask


class Histogram(Masked):
    @staticmethod
    def forward(ctx, x):
        counts, edges = np.histogram(x.detach().numpy(), bins=4)
        found = {"most": counts.max(), "first": edges[0]}
        mask = torch.full_like(x, float(found["most"])) + torch.tensor(found["first"])
        ctx.save_for_backward(mask)
        return x.sin() * mask


class Counted(Masked):
    @staticmethod
    def forward(ctx, x):
        counts = collections.Counter(x.round().flatten().tolist())
        mask = torch.full_like(x, counts.most_common(1)[0][1])
        ctx.save_for_backward(mask)
        return x.sin() * mask


class Sparse(Masked):
    @staticmethod
    def forward(ctx, x):
        pairs = x.relu().to_sparse()
        y = x.sin()
        mask = pairs.to_dense() + 1
        ctx.save_for_backward(mask)
        return y * mask


CLASSES = (OwnGenerator, OwnGeneratorInALoop, OwnGeneratorInABranch, OfNumpy, OfPython, Histogram, Counted, Sparse)


@both
@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_what_uses_it_runs_as_written_and_the_rest_is_captured(cls, backend) -> None:
    fast = fusegrad.compile(cls, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for seed, rows in enumerate((3, 3, 5, 1, 3)):
            users, mine = (leaf(rows, 4, seed=seed) for _ in range(2))
            wanted, found = cls.apply(users), fast.apply(mine)
            torch.testing.assert_close(found, wanted)
            for of, x in ((wanted, users), (found, mine)):
                of.square().sum().backward()
                assert x.grad is not None
            torch.testing.assert_close(mine.grad, users.grad)
    records = fast._fusegrad.ledger.records
    assert {records[m].status for m in records} == {"compiled"}, records
    assert [call.method for call in fast._fusegrad.ledger.opaque_calls] == ["forward"]


class Keeps(Function):
    """It is on ctx as well: no segment has it alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.rng = rng = torch.Generator().manual_seed(1)
        mask = torch.rand(x.shape, generator=rng)
        return x * mask

    @staticmethod
    def backward(ctx, g):
        return g * torch.rand(g.shape, generator=ctx.rng)


def test_what_is_on_ctx_besides_stays_the_users() -> None:
    fast = fusegrad.compile(Keeps)
    with pytest.warns(fusegrad.FallbackWarning, match="Generator"):
        for _ in range(3):
            users, mine = leaf(3, 4), leaf(3, 4)
            torch.testing.assert_close(fast.apply(mine), Keeps.apply(users))
    gradients = [torch.autograd.grad(c.apply(x).sum(), x)[0] for c, x in ((fast, leaf(3, 4)), (Keeps, leaf(3, 4)))]
    assert torch.equal(*gradients)
    assert fast._fusegrad.ledger.records["forward"].status == "opaque"


class Accumulates(Function):
    """The saved tensor is the leaf: its `.grad` is there at the next backward of the same call."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.detach())
        return x * 1

    @staticmethod
    def backward(ctx, g):
        (saved,) = ctx.saved_tensors
        with torch.enable_grad():
            saved.requires_grad = True
            if random.random() < 0:
                print("rarely")
            (saved.exp() * saved).sum().backward()
        return g + saved.grad


@both
def test_a_gradient_that_lines_leave_on_a_saved_tensor_is_there_the_next_time(backend) -> None:
    fast = fusegrad.compile(Accumulates, backend=backend)
    with pytest.warns(fusegrad.FallbackWarning, match=r"Accumulates\.backward"):
        for seed in range(3):
            users, mine = leaf(3, 4, seed=seed), leaf(3, 4, seed=seed)
            wanted, found = Accumulates.apply(users), fast.apply(mine)
            for _ in range(3):
                (a,) = torch.autograd.grad(wanted.sum(), users, retain_graph=True)
                (b,) = torch.autograd.grad(found.sum(), mine, retain_graph=True)
                torch.testing.assert_close(b, a)
