"""A loop of any length after the first call: nothing is traced or compiled again; what the first call costs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops.suite.cells import Gated
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fusegrad

LENGTHS = range(10, 110)
APART = 1 if os.environ.get("FUSEGRAD_TESTS") == "all" else 9
"""Of the lengths that the interpreter takes, which is slow."""
SHORT = (5, 6, 8)
"""The lengths at which a loop is traced before it is rolled."""
LIMIT = 2.0
"""Seconds of the first call beyond torch's own capture of the short loops."""


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_a_hundred_lengths_are_traced_and_compiled_once(backend: str) -> None:
    fast, made = fusegrad.compile(Gated), list[dict[str, int]]()
    with fusegrad.config.patch(backend=backend):
        for steps in LENGTHS if backend == "reference" else LENGTHS[::APART]:
            a, x = torch.rand(steps, 2, 3).requires_grad_(), torch.randn(steps, 2, 3, requires_grad=True)
            grads = torch.autograd.grad(fast.apply(a, x).sum(), (a, x))
            expected = torch.autograd.grad(Gated.apply(a, x).sum(), (a, x))
            for found, wanted in zip(grads, expected, strict=True):
                torch.testing.assert_close(found, wanted)
            made.append({key: fusegrad.stats()[key] for key in ("captures", "compiles")})
    assert made[0] == made[-1]


def seconds(work: Callable[[], Any]) -> float:
    """Of this process: other ones take turns with it."""
    start = time.process_time()
    work()
    return time.process_time() - start


def captured_by_torch() -> None:
    """torch's own capture of the short loops, forward and backward."""
    for steps in SHORT:
        a, x = torch.rand(steps, 3, 32).requires_grad_(), torch.randn(steps, 3, 32, requires_grad=True)

        def both(a: Tensor, x: Tensor) -> Any:
            return torch.autograd.grad(Gated.apply(a, x).sum(), (a, x))

        make_fx(both, tracing_mode="symbolic")(a, x)


def test_the_first_call_of_a_long_loop_is_soon_there() -> None:
    """Traced, rolled, proved, lowered, and its kernels generated."""
    captured_by_torch()  # and what is imported then
    given = [torch.empty(4096, 3, 32, device="meta", requires_grad=True) for _ in range(2)]
    fusegrad.explain(fusegrad.compile(Gated), *(g[:64] for g in given), target="cuda:90")
    own = seconds(lambda: fusegrad.explain(fusegrad.compile(Gated), *given, target="cuda:90"))
    assert own - seconds(captured_by_torch) < LIMIT
