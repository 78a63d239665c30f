"""A slice of `make soak`: a few thousand calls over a few shapes, and what would grow by itself."""

from __future__ import annotations

import gc
import weakref

import soak
import torch
import trust_functions as functions

import fusegrad


def test_a_slice() -> None:
    found = soak.soak(1500, 6, seed=3, tell=lambda found: None, warm_calls=300)
    assert not found["wrong"] and found["compared_with_eager"] >= 2
    assert found["before"]["threads"] == found["after"]["threads"]
    assert found["before"]["files"] == found["after"]["files"]
    assert found["after"]["garbage"] == 0
    assert found["growth_bytes"] < soak.GROWTH


def test_numbers_that_are_new_at_every_call_are_not_captured_without_end() -> None:
    fast, x = fusegrad.compile(functions.Scale), torch.ones(3)
    for at in range(300):
        assert fast.apply(x, at / 7)[0].item() == torch.tensor(1.0).mul(at / 7).item()
    compiler = fast._fusegrad
    assert len(compiler.known) <= 64 and len(compiler.refused) <= 1024 and len(compiler.exact) <= 1024


def test_a_class_that_nobody_has_any_more_is_gone() -> None:
    """Factories and notebooks make classes again and again: compiled, called, differentiated, dropped."""
    gone = [weakref.ref(made) for made in (_used_class(backend) for backend in ("reference", "interpret"))]
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def _used_class(backend: str) -> type:
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    fast = fusegrad.compile(Local, backend=backend)
    x = torch.ones(3, requires_grad=True)
    for _ in range(8):
        fast.apply(x).sum().backward()
    return Local
