"""fusegrad.random: numbers from a seed and an offset, the same in eager code, in a captured graph and in a kernel."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.autograd import Function
from torch.func import grad, vmap

import fusegrad
from fusegrad.codegen.emit.mathematics import first_uniform
from fusegrad.runtime.execution.aten import philox


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


@pytest.mark.parametrize("shape", [(6, 64), (5, 7), (3, 2, 48), (16,), (2, 1, 33)], ids=str)
def test_every_shape_draws_the_numbers_of_eager(shape):
    """Rows that begin at multiples of eight, and others: neighbours share their counters."""

    def drawn(x, seed):
        turned = torch.Size(reversed(x.shape))
        return x + fusegrad.random.uniform(x.shape, seed, like=x), fusegrad.random.normal(turned, seed, like=x)

    x, seed = torch.zeros(shape), torch.tensor(2**33 + 5)
    for mine, theirs in zip(fusegrad.compile(drawn, backend="interpret")(x, seed), drawn(x, seed), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("limit", [1e-9, 0.1, 0.5, 0.999999999, 0, 1.0])
def test_numbers_are_compared_as_in_eager(limit):
    """A comparison that is all that reads them asks their words."""

    def compared(x, seed):
        a, b, c, d = (fusegrad.random.uniform(x.shape, seed, k, like=x) for k in (0, 5, 7, 9))
        return torch.where(a >= limit, x, 0), torch.where(b > limit, x, 1), torch.where(c < limit, x, 2), d <= limit

    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    for mine, theirs in zip(fusegrad.compile(compared, backend="interpret")(x, 5), compared(x, 5), strict=True):
        assert torch.equal(mine, theirs)


def test_the_first_number_above_a_limit():
    """The integer before it makes a number below, at the limit itself, and one step of float32 around it."""
    step = torch.tensor(4.6566127342e-10)
    for limit in (1e-9, 0.1, 0.25, 0.3, 0.5, 0.75, float(torch.tensor(3) * step)):
        for comparison, is_above in (("ge", torch.ge), ("gt", torch.gt)):
            first = first_uniform(comparison, limit)
            around = torch.tensor([first - 1, first, first + 1]).float() * step
            assert is_above(around, torch.tensor(limit)).tolist() == [False, True, True]
            assert first_uniform({"ge": "lt", "gt": "le"}[comparison], limit) == first
    assert first_uniform("gt", 0.999999999) == 1 << 31, "none is"


def test_dropout_asks_the_words_alone():
    text = fusegrad.explain(Dropout, "bf16[64,128]", 3, 0.1, target="cuda:90").module
    assert "uniform_from(" in text and "ptx=True" in text and "def uniform(" not in text
    assert "random_word(seed, col" not in text, "the offset of eleven is no multiple of eight"


@pytest.mark.parametrize(
    ("columns", "offset", "is_shared"), [(128, 0, True), (128, 64, True), (128, 4, False), (100, 0, False)]
)
def test_neighbours_share_a_counter_where_rows_begin_at_multiples_of_eight(columns, offset, is_shared):
    class Noise(Function):
        @staticmethod
        def forward(ctx, x, bias):
            return x + bias + fusegrad.random.uniform(x.shape, 7, offset, like=x)

        @staticmethod
        def backward(ctx, g):
            return g, g.sum(0)

    found = fusegrad.explain(Noise, f"f32[64,{columns}]", f"f32[{columns}]", target="cuda:90")
    assert "uniform(random_word(" in found.module and (", col, " in found.module) is is_shared
    (record,) = (k for k in found.kernel_records if "forward" in k.name)
    binary = found.binaries("cuda:90")[record.name]["cuda:90"]
    # Eight lanes of a thread have two counters of at most forty products, or more; of rows of 100 it has four lanes
    products = binary.asm["ptx"].count("mul.wide.u32")
    assert (products < 80) is (is_shared or columns == 100)


@pytest.mark.parametrize("columns", [4, 12, 16, 20, 100])
def test_rows_that_begin_at_multiples_of_four_have_eagers_numbers(columns):
    class Noise(Function):
        @staticmethod
        def forward(ctx, x, bias):
            return x + bias + fusegrad.random.uniform(x.shape, 7, like=x)

        @staticmethod
        def backward(ctx, g):
            return g, g.sum(0)

    given = torch.zeros(64, columns), torch.zeros(columns)
    assert torch.equal(fusegrad.compile(Noise, backend="interpret").apply(*given), Noise.apply(*given))


@pytest.mark.parametrize("offset", [0, 8, 2**34 - 16, 3, 2**34 - 3])
@pytest.mark.parametrize("draw", [fusegrad.random.uniform, fusegrad.random.normal])
def test_offsets_that_are_numbers(draw, offset):
    """On to the next high word of the counter, from a multiple of eight and from another place."""

    def drawn(x, bias, seed):
        return x + bias + draw(x.shape, seed, offset, like=x)

    x, bias, seed = torch.zeros(3, 48), torch.zeros(48), torch.tensor(2**33 + 5)
    found = fusegrad.compile(drawn, backend="interpret")(x, bias, seed)
    torch.testing.assert_close(found, drawn(x, bias, seed), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "is_shared"), [(torch.bfloat16, True), (torch.float32, False)], ids=["bf16", "f32"])
def test_rows_of_odd_lengths_are_drawn_from_boundaries_of_eight_elements(dtype, is_shared):
    """Where blocks begin at 16 bytes, of which float32 has four."""

    def drawn(x, bias, seed):
        return torch.where(fusegrad.random.uniform(x.shape, seed, 0, like=x) >= 0.5, x + bias, 0)

    x, bias, seed = torch.ones(9, 4099, dtype=dtype), torch.ones(4099, dtype=dtype), torch.tensor(2**33 + 5)
    fast = fusegrad.compile(drawn, backend="interpret")
    assert torch.equal(fast(x, bias, seed), drawn(x, bias, seed))
    text = fusegrad.explain(drawn, x, bias, seed, target="cuda:90").module
    assert "whole = " in text and ("random_word(seed, col, " in text) is is_shared


def test_an_offset_that_is_a_size():
    def drawn(x, bias, seed):
        return x + bias + fusegrad.random.uniform(x.shape, seed, x.shape[0], like=x)

    fast, bias, seed = fusegrad.compile(drawn, backend="interpret"), torch.zeros(32), torch.tensor(5)
    for rows in (16, 32, 3, 8):
        x = torch.zeros(rows, 32)
        assert torch.equal(fast(x, bias, seed), drawn(x, bias, seed))


def test_four_numbers_are_drawn_with_each_counter():
    """Place i has word i % 4 of counter i // 4; two words make two normal numbers."""
    like, seed = torch.empty(0), torch.tensor(2**40 + 1)
    words = torch.stack(philox.philox(seed, torch.arange(5, 8)), 1)
    shares = torch.where(words < 2**31, words, 2**32 - 1 - words).reshape(-1).double() / 2**31
    found = fusegrad.random.uniform((12,), seed, 20, like=like)
    torch.testing.assert_close(found, shares.float(), rtol=1e-6, atol=0)
    pairs = shares.reshape(-1, 2)
    radius, angle = (-2 * pairs[:, 0].log()).sqrt(), 2 * torch.pi * pairs[:, 1]
    expected = torch.stack([radius * angle.cos(), radius * angle.sin()], 1).reshape(-1)
    found = fusegrad.random.normal((12,), seed, 20, like=like)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)


def test_another_seed_draws_other_numbers():
    fast = fusegrad.compile(Dropout, backend="interpret")
    assert not torch.equal(forward_and_gradient(fast, 1)[0], forward_and_gradient(fast, 2)[0])


def test_the_mask_is_drawn_again_and_not_saved():
    facts = fusegrad.explain(Dropout, "f32[64,128]", 3, 0.3).to_dict()
    assert facts["saved_bytes"] == 0
    assert facts["launches"] == {"forward": 1, "backward": 1}
    assert fusegrad.explain(Dropout, "f32[64,128]", 3, 0.3, target="cpu").to_dict()["saved_bytes"] == 64 * 128


@pytest.mark.parametrize("draw", [fusegrad.random.uniform, fusegrad.random.normal])
def test_offsets_continue_a_sequence(draw):
    like = torch.empty(0)
    whole = draw((20,), 5, like=like)
    assert whole.dtype == torch.float32 and whole.unique().numel() == 20
    for start in range(9):
        for count in (0, 1, 2, 3, 4, 5, 11):
            assert torch.equal(draw((count,), 5, start, like=like), whole[start : start + count])
    assert torch.equal(draw((20,), 5, -7, like=like)[7:], whole[:13])


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
