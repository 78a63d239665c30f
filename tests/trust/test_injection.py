"""A slice of the long run: a few functions of a few scenes raise, and that the run notices what is wrong."""

from __future__ import annotations

from typing import Any

import injection
import pytest
import torch
from injected_scenes import SCENES

import fusegrad
from fusegrad.runtime.capture.outputs import rebuild_output
from fusegrad.runtime.fallback.answer import Fault

SLICE = {
    "norm, first call, reference": 0.04,
    "norm, later call, reference": 1.0,
    "norm, backward, reference": 0.04,
    "norm, second backward, reference": 0.05,
    "norm, vmap of grad, reference": 0.01,
    "norm, first call, interpret": 0.004,
    "noise, backward, reference": 0.04,
    "written, later call, interpret": 0.2,
    "around, later call, reference": 0.1,
    "function, backward, reference": 0.04,
}
pytestmark = pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")


@pytest.mark.parametrize("name", SLICE)
def test_a_slice(name: str) -> None:
    found = injection.Injection(SCENES[name], 11).all(SLICE[name])
    assert found.functions and not found.wrong and not found.raised and not found.afterwards


def functions_of(name: str) -> tuple[injection.Injection, dict[str, Any]]:
    run = injection.Injection(SCENES[name])
    return run, {place: code for code, place in run.functions().items()}


def test_a_call_without_the_net_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run, found = functions_of("norm, first call, reference")
    place = "runtime/compiled/keys.py:Keys.exact"
    monkeypatch.setattr("fusegrad.runtime.dispatch.entry.is_fault", lambda error: False)
    run.one(found[place], place)
    assert len(run.result.raised) == run.result.hits == 1


def test_a_wrong_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run, found = functions_of("norm, first call, reference")
    place = "runtime/compiled/keys.py:Keys.exact"
    monkeypatch.setattr(
        "fusegrad.runtime.dispatch.compiled_class.answer_as_written",
        lambda compiler, args, *_: torch.zeros_like(args[0], requires_grad=True),
    )
    run.one(found[place], place)
    assert run.result.wrong


def test_numbers_drawn_twice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run, found = functions_of("noise, first call, reference")
    place = "runtime/capture/outputs.py:rebuild_output"
    assert place in found
    monkeypatch.setattr("fusegrad.runtime.fallback.effects.EffectsBefore.settle", lambda self, error: None)
    run.one(found[place], place)
    assert run.result.wrong


def test_a_fault_ends_with_its_block() -> None:
    before = rebuild_output.__code__
    with injection.fault(before, KeyError) as injected, pytest.raises(KeyError, match="injected"):
        rebuild_output(None, ())  # type: ignore[arg-type]
    assert rebuild_output.__code__ is before and injected.hits == 1


def test_what_the_run_leaves_out_is_the_net_itself() -> None:
    code = Fault.of.__func__.__code__  # type: ignore[attr-defined]
    place = injection.place_of(code)
    assert place is not None and place.startswith(injection.NET)
    assert fusegrad.runtime.fallback.answer.__doc__
