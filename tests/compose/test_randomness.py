"""vmap's randomness: torch's generator obeys it, fusegrad.random follows its seed; gradients belong to the draw."""

from __future__ import annotations

import pytest
import torch
from compose.composing import compiled
from compose.functions import CASES, Numbers
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
