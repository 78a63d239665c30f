"""A slice of `make soak`: a few thousand calls over a few shapes, and what would grow by itself."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import soak
import torch
import trust_functions as functions

import fusegrad
from fusegrad.runtime.autograd import opaque_forward as opaque
from fusegrad.runtime.compiled import captures


@pytest.fixture(autouse=True)
def few_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are reached sooner."""
    monkeypatch.setattr(captures, "VARIANTS", 6)
    monkeypatch.setattr(opaque, "BACKWARDS", 6)


def test_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "COMPARED", 50)
    monkeypatch.setattr(soak, "NUMBERED", 8)
    run = soak.Soak(soak.shapes(6), 3, (functions.Softmax, functions.Scale))
    found = soak.soak(run, 150, lambda found: None, warm_calls=60)
    assert not found["wrong"] and found["compared_with_eager"] >= 3 and found["distinct_numbers"] > 15
    assert found["before"]["threads"] == found["after"]["threads"]
    assert found["before"]["files"] == found["after"]["files"]
    assert found["after"]["garbage"] == 0
    grown = found["after"]["objects"] - found["before"]["objects"]  # memory varies: other tests ran here
    assert grown < 20 * 150, found


def test_numbers_that_are_new_at_every_call_are_neither_captured_nor_remembered_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fusegrad.runtime.compiled.table.REMEMBERED", 128)  # 1,024 calls would take long
    fast, x = fusegrad.compile(functions.Scale), torch.ones(3)
    for at in range(300):
        assert fast.apply(x, at / 7)[0].item() == torch.tensor(1.0).mul(at / 7).item()
    compiler = fast._fusegrad
    assert len(compiler.table.by_facts) == 6 and len(compiler.table.refused) == len(compiler.table.by_call) == 128


@pytest.mark.parametrize("cls", [functions.Scale, functions.Opaque], ids=lambda c: c.__name__)
def test_tensors_of_calls_that_are_not_captured_are_not_kept(cls) -> None:
    """The reason for which a call was not captured is kept, the frames in which it was found are not."""
    fast, alive = fusegrad.compile(cls), []
    for at in range(100):
        x = torch.full((3,), float(at), requires_grad=True)
        fast.apply(x, at / 7).sum().backward() if cls is functions.Scale else fast.apply(x).sum().backward()
        alive.append(weakref.ref(x))
    del x
    gc.collect()
    assert [ref for ref in alive if ref() is not None] == []


def test_a_class_that_nobody_has_any_more_is_gone() -> None:
    """Factories and notebooks make classes again and again: compiled, called, differentiated, dropped."""
    used = [_used_class(backend) for backend in ("reference", "interpret")]
    gone = [weakref.ref(made) for pair in used for made in pair]
    del used
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def _used_class(backend: str) -> tuple[type, Any]:
    """The user's class, and what is known of it."""
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
    return Local, fast._fusegrad
