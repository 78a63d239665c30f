"""A slice of `make threads`: every scenario in a few threads, and what made them necessary."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import threads
import torch
import trust_functions as functions
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fusegrad
from fusegrad.ir.lazy_attribute import lazy_attribute
from fusegrad.tracer.torch_private import dual_level, plain_tensors


@pytest.mark.parametrize("scenario", threads.SCENARIOS, ids=lambda s: s.__name__)
def test_scenarios(scenario) -> None:
    found = threads.run(scenario, 6)
    assert found.calls and found.ok, (found.wrong, found.raised, found.captures, found.expected)


def test_plain_tensors_leave_the_forward_mode_of_other_threads_alone() -> None:
    """torch's level is one for the process: hiding it here must not end it there."""
    entered, left = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with plain_tensors():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    entered.wait(10)
    with forward_ad.dual_level():
        left.set()
        thread.join()
        assert dual_level() == 0
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        assert forward_ad.unpack_dual(dual * 2).tangent.tolist() == [2, 2]
        with plain_tensors():
            assert dual_level() == -1
    assert dual_level() == -1


@pytest.mark.parametrize(("in_forward", "in_backward"), [(True, False), (False, True), (True, True)])
def test_a_level_of_forward_mode_changes_nothing_of_a_checkpoint(in_forward: bool, in_backward: bool) -> None:
    """It is one for all threads, opened by any: what a call on plain tensors saves for backward is counted there."""
    fast = fusegrad.compile(functions.LayerNorm, backend="reference")
    x, w, b = (torch.randn(s, requires_grad=True) for s in ((4, 3), (3,), (3,)))
    expected = torch.autograd.grad(functions.LayerNorm.apply(x, w, b).sum(), (x, w, b))
    with forward_ad.dual_level() if in_forward else nullcontext():
        y = checkpoint(fast.apply, x, w, b, use_reentrant=False)
    with forward_ad.dual_level() if in_backward else nullcontext():
        found = torch.autograd.grad(y.sum(), (x, w, b))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_forward_reads_beside_its_arguments_brings_no_tangent() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))

        class Reads(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * dual

            @staticmethod
            def backward(ctx, g):
                return g * dual

        fast, x = fusegrad.compile(Reads, backend="reference"), torch.ones(3)
        for _ in range(6):  # the last ones by an entry of the inline cache, where one may be used
            assert forward_ad.unpack_dual(fast.apply(x)).tangent is None


def test_an_attribute_is_made_without_a_lock_and_once_for_all() -> None:
    """Two objects, each made while the other waits: under one lock for all this would never end."""
    meet = threading.Barrier(2, timeout=10)

    class Slow:
        @lazy_attribute
        def value(self) -> object:
            meet.wait()
            return object()

    mine, seen = Slow(), []
    pair = [threading.Thread(target=lambda: seen.append(mine.value)) for _ in range(2)]
    for thread in pair:
        thread.start()
    for thread in pair:
        thread.join()
    assert seen[0] is seen[1] is mine.value
