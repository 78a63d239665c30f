"""vmap's randomness: torch's generator obeys it, fusegrad.random follows its seed; gradients belong to the draw."""

from __future__ import annotations

import pytest
import torch
from compose.composing import compiled
from compose.functions import CASES, Numbers
from torch.autograd import Function
from torch.func import grad, jvp, vjp, vmap

import fusegrad

BY_NAME = {c.name: c for c in CASES}
LANES = 4
X = torch.ones(LANES, 16, dtype=torch.float64)


def apply(name):
    return compiled(BY_NAME[name]).apply


def dropped(x):
    return apply("Dropout")(x, 0.5)


def jittered(x):
    return apply("Jitter")(x)


generated = pytest.mark.parametrize("f", [dropped, jittered])


@generated
def test_error_by_default(f) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(f)(X)
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(grad(lambda x: f(x).sum()))(X)


@generated
def test_same(f) -> None:
    for _ in range(2):
        y = vmap(f, randomness="same")(X)
        assert (y == y[:1]).all() and len(y[0].unique()) > 1


@generated
def test_different(f) -> None:
    for _ in range(2):
        y = vmap(f, randomness="different")(X.repeat(1, 5))
        assert all((y[i] != y[j]).any() for i in range(LANES) for j in range(i))


@generated
def test_every_call_draws_again(f) -> None:
    x = X.repeat(1, 5)
    for randomness in ("same", "different"):
        assert (vmap(f, randomness=randomness)(x) != vmap(f, randomness=randomness)(x)).any()


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_derivatives_belong_to_the_draw(randomness) -> None:
    x = X + torch.rand(X.shape, generator=torch.Generator().manual_seed(3), dtype=X.dtype)

    def both(x):
        y, pull = vjp(dropped, x)
        return y, pull(torch.ones_like(x))[0]

    y, pulled = vmap(both, randomness=randomness)(x)
    torch.testing.assert_close(y, x * pulled)
    y, pushed = vmap(lambda x: jvp(dropped, (x,), (2 * torch.ones_like(x),)), randomness=randomness)(x)
    torch.testing.assert_close(2 * y, x * pushed)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_the_generators_numbers_are_those_of_eager(randomness) -> None:
    draws = []
    for f in (jittered, BY_NAME["Jitter"].cls.apply):
        vmap(f, randomness=randomness)(X)
        torch.manual_seed(5)
        draws.append(vmap(f, randomness=randomness)(X))
    assert torch.equal(*draws)


def seeded(x, seed):
    return apply("SeededDropout")(x, seed, 0.25)


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_a_seed_says_it_all(randomness) -> None:
    x, seeds = Numbers(0)(LANES, 2, 4), torch.arange(LANES)
    masks = torch.stack([(fusegrad.random.uniform((2, 4), s, like=x) >= 0.25) / 0.75 for s in seeds])
    torch.testing.assert_close(vmap(seeded, randomness=randomness)(x, seeds), x * masks)
    shared = vmap(seeded, (0, None), randomness=randomness)(x, seeds[1])
    torch.testing.assert_close(shared, x * masks[1])
    pulled = vmap(grad(lambda x, s: seeded(x, s).sum()), randomness=randomness)(x, seeds)
    torch.testing.assert_close(pulled, masks.to(x.dtype))


FILLS = {
    "uniform": lambda t: t.uniform_(-1, 1),
    "normal": lambda t: t.normal_(),
    "exponential": lambda t: t.exponential_(),
    "cauchy": lambda t: t.cauchy_(),
    "geometric": lambda t: t.geometric_(0.3),
    "log_normal": lambda t: t.log_normal_(),
    "random": lambda t: t.random_(0, 100),
}


def filled(fill, fresh: bool) -> type:
    """Draws by filling memory: of its argument's lane, or made without a look at the argument."""

    class Filled(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x * fill(torch.empty(x.shape) if fresh else torch.empty_like(x))

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return g * fill(torch.empty_like(g))

    return Filled


def drawn(cls, x, randomness):
    torch.manual_seed(5)
    pulled = grad(lambda x: cls.apply(x).sum())
    return vmap(cls.apply, randomness=randomness)(x), vmap(pulled, randomness=randomness)(x)


@pytest.mark.parametrize("kind", FILLS)
def test_what_is_filled_obeys_it_as_in_eager(kind) -> None:
    cls, x = filled(FILLS[kind], False), torch.ones(LANES, 16)
    fast = fusegrad.compile(cls)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(fast.apply)(x)
    for randomness in ("same", "different"):
        assert all(map(torch.equal, drawn(fast, x, randomness), drawn(cls, x, randomness)))


@pytest.mark.parametrize("kind", FILLS)
def test_fresh_memory_is_filled_for_every_lane(kind) -> None:
    fast, x = fusegrad.compile(filled(FILLS[kind], True)), torch.ones(LANES, 16)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(fast.apply)(x)
    y = vmap(fast.apply, randomness="same")(x)
    assert (y == y[:1]).all() and len(y[0].unique()) > 1
    y = vmap(fast.apply, randomness="different")(x)
    assert all((y[i] != y[j]).any() for i in range(LANES) for j in range(i))


@pytest.mark.parametrize("draw", [torch.rand_like, lambda x: x.new(x.shape).uniform_()], ids=["made", "filled"])
def test_torch_says_so_of_a_class_in_the_old_style_too(draw) -> None:
    class Noisy(Function):
        @staticmethod
        def forward(ctx, x):
            return x + draw(x)

        @staticmethod
        def backward(ctx, g):
            return g

    fast = fusegrad.compile(Noisy)
    with pytest.raises(RuntimeError, match="randomness error mode"):
        vmap(fast.apply)(X)
    assert all(r.code is None for r in fast._fusegrad.ledger.records.values())
