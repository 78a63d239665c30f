"""Arguments that overflow: activations where another branch is taken, sums of powers of infinities."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.func import jvp

import fusegrad

ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "softplus": F.softplus,
    "of half": lambda x: F.softplus(x, beta=0.5, threshold=3.0),
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
}


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_jvp(name: str, backend: str) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[name](x)

    x, t = torch.tensor([106.0, -200.0, 3.0, 25.0, -0.5]), torch.tensor([1.0, 2.0, -1.0, 0.5, 3.0])
    found = jvp(fusegrad.compile(call, backend=backend), (x,), (t,))
    torch.testing.assert_close(found, jvp(call, (x,), (t,)))


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(x, 1)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_logsumexp_of_infinities(backend: str) -> None:
    """Rows of nothing, with an infinity, of infinities alone, and with a NaN: derivatives and tangents as in eager."""
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, -2.0, 3], [-inf] * 3, [0.0, inf, 1], [inf] * 3, [-inf, 2.0, -inf], [1.0, nan, 0]])

    def derivatives(call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        own = x.clone().requires_grad_()
        out = call(own)
        (first,) = torch.autograd.grad(out.sum(), own, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), own)
        return [out, first, second, *jvp(call, (x,), (torch.full_like(x, 0.5),))]

    found, right = (derivatives(c) for c in (fusegrad.compile(logsumexp, backend=backend), logsumexp))
    torch.testing.assert_close(found, right, equal_nan=True)
