"""fusegrad.random: numbers from a seed and an offset, the same in eager code, in a captured graph and in a kernel."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function

import fusegrad


class Dropout(Function):
    @staticmethod
    def forward(ctx, x, seed, p):
        keep = fusegrad.random.uniform(x.shape, seed, 11, like=x) > p
        ctx.save_for_backward(keep)
        ctx.p = p
        return torch.where(keep, x / (1 - p), 0.0)

    @staticmethod
    def backward(ctx, g):
        (keep,) = ctx.saved_tensors
        return torch.where(keep, g / (1 - ctx.p), 0.0), None, None


def forward_and_gradient(cls, seed):
    x = torch.arange(1.0, 36.0).reshape(5, 7).requires_grad_()
    y = cls.apply(x, seed, 0.3)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("seed", [3, torch.tensor(2**40 + 1)], ids=["int", "tensor"])
def test_compiled_dropout_draws_the_numbers_of_eager(backend, seed):
    expected = forward_and_gradient(Dropout, seed)
    assert 0 < (expected[0] == 0).sum() < 35
    found = forward_and_gradient(fusegrad.compile(Dropout, backend=backend), seed)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_another_seed_draws_other_numbers():
    fast = fusegrad.compile(Dropout, backend="interpret")
    assert not torch.equal(forward_and_gradient(fast, 1)[0], forward_and_gradient(fast, 2)[0])


def test_the_mask_is_drawn_again_and_not_saved():
    facts = fusegrad.explain(Dropout, "f32[64,128]", 3, 0.3).to_dict()
    assert facts["saved_bytes"] == 0
    assert facts["launches"] == {"forward": 1, "backward": 1}
    assert fusegrad.explain(Dropout, "f32[64,128]", 3, 0.3, target="cpu").to_dict()["saved_bytes"] == 64 * 128


def test_offsets_continue_a_sequence():
    like = torch.empty(0)
    whole = fusegrad.random.normal((10,), 5, like=like)
    assert torch.equal(fusegrad.random.normal((6,), 5, 4, like=like), whole[4:])
    assert whole.dtype == torch.float32
