"""fusegrad.random: numbers from a seed and an offset, the same in eager code, in a captured graph and in a kernel."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.autograd import Function
from torch.func import grad, vmap

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


SEEDS, OFFSETS = torch.tensor([3, 2**40 + 1, -7]), torch.tensor([0, 5, 2**33])
LANES = {"seeds": (0, None), "offsets": (None, 0), "both": (0, 0), "neither": (None, None)}


@pytest.fixture
def unbatched_operations_raise():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*")
        yield


@pytest.mark.parametrize("draw", [fusegrad.random.uniform, fusegrad.random.normal])
@pytest.mark.parametrize("dims", LANES.values(), ids=LANES)
@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_each_lane_of_vmap_draws_with_its_own_seed_and_offset(draw, dims, randomness, unbatched_operations_raise):
    x = torch.zeros(3, 2, 4)
    seed, offset = (t if d == 0 else t[1] for t, d in zip((SEEDS, OFFSETS), dims, strict=True))
    found = vmap(lambda x, s, o: x + draw((2, 4), s, o, like=x), (0, *dims), randomness=randomness)(x, seed, offset)
    seeds, offsets = (t.expand(3) for t in (seed, offset))
    expected = torch.stack([draw((2, 4), s, o, like=x) for s, o in zip(seeds, offsets, strict=True)])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("per_lane", [False, True], ids=["one seed", "a seed per lane"])
def test_vmap_of_compiled_dropout_does_not_loop(backend, per_lane, unbatched_operations_raise):
    seeds = SEEDS if per_lane else SEEDS[1]
    dims = (0, 0 if per_lane else None)
    x = torch.arange(1.0, 106.0).reshape(3, 5, 7)
    keep = torch.stack([fusegrad.random.uniform((5, 7), s, 11, like=x) > 0.3 for s in seeds.expand(3)])
    fast = fusegrad.compile(Dropout, backend=backend)
    dropped = vmap(lambda x, s: fast.apply(x, s, 0.3), dims)(x, seeds)
    assert torch.equal(dropped, torch.where(keep, x / 0.7, 0.0))
    pulled = vmap(grad(lambda x, s: fast.apply(x, s, 0.3).sum()), dims)(x, seeds)
    assert torch.equal(pulled, torch.where(keep, 1 / torch.tensor(0.7), 0.0))


def test_vmap_of_two_batch_axes(unbatched_operations_raise):
    like = torch.zeros(())
    draw = lambda s, o: fusegrad.random.uniform((4,), s, o, like=like)  # noqa: E731
    found = vmap(vmap(draw, (None, 0)), (0, None))(SEEDS, OFFSETS)
    expected = torch.stack([torch.stack([draw(s, o) for o in OFFSETS]) for s in SEEDS])
    assert torch.equal(found, expected)
