"""Settings: environment, patch, the argument of compile, and their errors."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import torch
from function_samples import Softmax, assert_same, leaf, run

import fusegrad
from fusegrad.runtime.settings import config


def test_defaults(monkeypatch) -> None:
    monkeypatch.delenv("FUSEGRAD_BACKEND", raising=False)
    monkeypatch.setattr(config, "_STORE", True)  # which the tests switch off
    config._settings_of.cache_clear()
    assert config.settings() == config.Settings(backend=None, check=True, debug=False)
    assert config.backend_name("auto") == "auto"
    config._settings_of.cache_clear()  # it would keep the store on for the tests that follow


def test_the_environment_wins_over_compile_and_patch_over_both(monkeypatch) -> None:
    monkeypatch.setenv("FUSEGRAD_BACKEND", "interpret")
    fast = fusegrad.compile(Softmax, backend="reference")
    assert fast._fusegrad.options.backend_for([leaf(2)]) == "interpret"
    with config.patch(backend="reference"):
        assert fast._fusegrad.options.backend_for([leaf(2)]) == "reference"
    with config.patch(backend=None):
        assert fast._fusegrad.options.backend_for([leaf(2)]) == "reference"
    monkeypatch.setenv("FUSEGRAD_BACKEND", "")
    assert config.backend_name("auto") == "auto"


def test_auto_is_the_reference_for_cpu_tensors() -> None:
    assert fusegrad.compile(Softmax)._fusegrad.options.backend_for([leaf(2)]) == "reference"


def test_a_backend_may_change_between_calls() -> None:
    fast = fusegrad.compile(Softmax)
    expected = run(Softmax, leaf(3, 4))
    for backend in ("reference", "interpret", "reference"):
        with config.patch(backend=backend):
            assert_same(run(fast, leaf(3, 4)), expected)
    with config.patch(backend="interpret"):
        y = fast.apply(x := leaf(3, 4))
    y.sum().backward()
    assert x.grad is not None


def test_patch_nests_and_ends() -> None:
    before = config.settings()
    with config.patch(check=False) as inner:
        assert inner.check is False
        with config.patch(backend="interpret"):
            assert config.settings().check is False and config.settings().backend == "interpret"
        assert config.settings().backend == before.backend
    assert config.settings() == before
    with pytest.raises(KeyError), config.patch(check=False):
        raise KeyError
    assert config.settings() == before


def test_patch_belongs_to_one_task() -> None:
    async def patched() -> str | None:
        with config.patch(backend="interpret"):
            await asyncio.sleep(0)
            return config.settings().backend

    async def bystander() -> str | None:
        await asyncio.sleep(0)
        return config.settings().backend

    async def both() -> list[str | None]:
        return list(await asyncio.gather(patched(), bystander()))

    assert asyncio.run(both())[0] == "interpret"
    assert asyncio.run(both())[1] == config.settings().backend


def test_errors(monkeypatch) -> None:
    with pytest.raises(config.ConfigError, match="there is no setting 'bakend'"), config.patch(bakend="x"):
        pass
    with pytest.raises(ValueError, match="there is no backend 'gpu'"), config.patch(backend="gpu"):
        pass
    with pytest.raises(config.ConfigError, match="use one of auto, triton"):
        fusegrad.compile(Softmax, backend="cuda")
    monkeypatch.setenv("FUSEGRAD_BACKEND", "nonsense")
    with pytest.raises(config.ConfigError, match="there is no backend 'nonsense'"):
        fusegrad.compile(Softmax).apply(leaf(3))


def test_triton_on_cpu_tensors_says_what_to_use() -> None:
    fast = fusegrad.compile(Softmax, backend="triton")
    with pytest.raises(fusegrad.FusegradError, match="Triton needs a GPU"):
        fast.apply(torch.randn(3, 4))


def test_debug_verifies_and_changes_nothing() -> None:
    with config.patch(debug=True, backend="interpret"):
        fast = fusegrad.compile(Softmax)
        assert_same(run(fast, leaf(3, 4)), run(Softmax, leaf(3, 4)))


def test_check_may_be_turned_off() -> None:
    from test_traceable import AsksForInt

    with config.patch(check=False):
        fast = fusegrad.compile(AsksForInt)
        assert torch.equal(fast.apply(torch.ones(2)), torch.full((2,), 3.0))  # unchecked: what the fakes saw


def test_every_variable_that_is_read_is_known() -> None:
    sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "site"))
    import reference

    assert reference.variables_read() <= {f"FUSEGRAD_{name}" for name in config.VARIABLES} == set(reference.VARIABLES)


def test_a_misspelt_setting_has_a_suggestion() -> None:
    with pytest.raises(config.ConfigError, match="did you mean backend"), config.patch(bakend="interpret"):
        raise AssertionError
