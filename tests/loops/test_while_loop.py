"""`while_loop` of torch, written in a Function: eager's values in every composition that eager has."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import while_loop
from torch.autograd import Function

import fusegrad
from fusegrad.tracer.opaque import call_interception


class Settles(Function):
    """Steps until their number is reached, which is data; backward as many steps."""

    @staticmethod
    def forward(x: Tensor, steps: Tensor) -> Tensor:
        def goes_on(i: Tensor, h: Tensor) -> Tensor:
            return i > 0

        def step(i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return i - 1, torch.tanh(h) + 0.5

        return while_loop(goes_on, step, (steps, x))[1]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        steps, h = ctx.saved_tensors

        def goes_on(i: Tensor, c: Tensor) -> Tensor:
            return i > 0

        def step(i: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            return i - 1, c * (1 - 0.1 * h)

        return while_loop(goes_on, step, (steps, g.clone()))[1], None


def gradient(apply: Any, x: Tensor, n: Tensor) -> Any:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(apply(x, n).sin().sum(), x)


WAYS: dict[str, Callable[..., Any]] = {"forward": lambda apply, x, n: [apply(x, n)], "backward": gradient}
"""torch.func has no rules for it in torch 2.13."""


@pytest.fixture(params=[False, True], ids=["", "beside an opaque operator"])
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once an operator turned out to be opaque, calls of operators are looked at in all methods."""
    if request.param:
        monkeypatch.setattr(call_interception, "opaque_operators", lambda: True)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("way", WAYS)
def test_compositions_have_eagers_values(way: str, backend: str) -> None:
    with warnings.catch_warnings(), fusegrad.config.patch(backend=backend):
        warnings.simplefilter("ignore")
        fast = fusegrad.compile(Settles)
        for size, steps in ((4, 3), (5, 7), (4, 0)):
            x, n = torch.randn(size), torch.tensor(steps)
            pairs = zip(WAYS[way](Settles.apply, x, n), WAYS[way](fast.apply, x, n), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
        assert fast._fusegrad.ledger.records["forward"].reason is None
