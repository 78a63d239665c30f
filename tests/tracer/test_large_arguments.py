"""Activations that overflow where another branch is taken: forward mode has the tangent of the branch alone."""

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
