"""Classes that change while they are used, in notebooks, by patches and reloads: old kernels run no new bodies."""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import Function

import fusegrad

CALLS = 8
"""Enough for the last ones to go the shortest way there is."""

MODULE = """
import torch, fusegrad

def scaled(x):
    return x * {k}

class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return scaled(x) + {k}

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * {k} * 10

Alias = fusegrad.compile(Written)

@fusegrad.compile
class Decorated(Written):
    @staticmethod
    def backward(ctx, g):
        return g * {k} * 10

@fusegrad.compile
def plain(x):
    return scaled(x) + {k}
"""


def seen(function: Any) -> set[tuple[float, float]]:
    """Values and gradients of a few calls."""
    found = set()
    for _ in range(CALLS):
        x = torch.full((3,), 2.0, requires_grad=True)
        y = function(x)
        y.sum().backward()
        found.add((y[0].item(), x.grad[0].item()))
    return found


class Base(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, g):
        return g * 3


def other_backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
    return g * 7


def test_a_method_that_is_assigned_runs_compiled_and_its_own_class_keeps_its_own() -> None:
    fast = fusegrad.compile(Base)
    assert seen(fast.apply) == {(6.0, 3.0)}
    fast.backward = staticmethod(other_backward)
    assert seen(fast.apply) == {(6.0, 7.0)} and seen(Base.apply) == {(6.0, 3.0)}
    assert fast._fusegrad.ledger.records["backward"].status == "compiled"
    fast.forward = staticmethod(lambda ctx, x: x * 5)
    assert seen(fast.apply) == seen(fusegrad.compile(fast).apply) == {(10.0, 7.0)}
    del fast.backward, fast.forward
    assert seen(fast.apply) == {(6.0, 3.0)}


def test_patches_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = fusegrad.compile(Base)
    for _ in range(2):
        with mock.patch.object(fast, "backward", staticmethod(other_backward)):
            assert seen(fast.apply) == {(6.0, 7.0)}
        assert seen(fast.apply) == {(6.0, 3.0)}
    with monkeypatch.context() as patch:
        patch.setattr(Base, "backward", staticmethod(other_backward))
        assert seen(fast.apply) == {(6.0, 7.0)}
    assert seen(fast.apply) == {(6.0, 3.0)}


def test_a_rule_that_is_assigned_replaces_the_derived_one() -> None:
    fast = fusegrad.compile(Base)
    primal, tangent = torch.ones(3), torch.ones(3)
    assert torch.func.jvp(fast.apply, (primal,), (tangent,))[1].tolist() == [3.0] * 3
    fast.jvp = staticmethod(lambda ctx, t: t * 11)
    assert torch.func.jvp(fast.apply, (primal,), (tangent,))[1].tolist() == [11.0] * 3


def test_inside_torch_compile_too() -> None:
    class Promised(Base):
        is_traceable = True

    fast = fusegrad.compile(Promised)

    def run(x: torch.Tensor) -> torch.Tensor:
        return fast.apply(x) + 0

    assert seen(torch.compile(run, backend="eager")) == {(6.0, 3.0)}
    fast.backward = staticmethod(other_backward)
    assert seen(torch.compile(run, backend="eager")) == {(6.0, 7.0)}


def cell(k: int) -> types.ModuleType:
    module = types.ModuleType("a_notebook")
    exec(compile(MODULE.format(k=k), "<cell>", "exec"), vars(module))
    return module


@pytest.mark.parametrize("name", ["Alias", "Decorated", "plain"])
def test_a_cell_that_is_run_again(name: str) -> None:
    """The same name, the same place in the source, another body: each its own, also when an old one is called again."""
    found = [getattr(cell(k), name) for k in (1, 2, 3)]
    for k in (0, 1, 2, 1, 0):
        call, n = getattr(found[k], "apply", found[k]), k + 1
        assert seen(call) == {(3.0 * n, 1.0 * n if name == "plain" else 10.0 * n)}


def written(folder: Path, k: int) -> None:
    file = folder / "reloaded_sample.py"
    file.write_text(MODULE.format(k=k), encoding="utf-8")
    os.utime(file, (k * 1000, k * 1000))


def test_a_module_that_is_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    written(tmp_path, 1)
    module = importlib.import_module("reloaded_sample")
    old = module.Alias, module.Decorated
    try:
        assert [seen(f.apply) for f in old] == [{(3.0, 10.0)}] * 2
        written(tmp_path, 2)
        importlib.reload(module)
        assert [seen(f.apply) for f in (module.Alias, module.Decorated)] == [{(6.0, 20.0)}] * 2
        assert {g for _, g in seen(old[0].apply)} == {10.0}  # its own backward; the helper is the module's, as in eager
    finally:
        del sys.modules["reloaded_sample"]


def test_autoreload_of_ipython(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It patches what exists: classes and functions that were taken from the module before follow the file."""
    autoreload = pytest.importorskip("IPython.extensions.autoreload")
    monkeypatch.syspath_prepend(str(tmp_path))
    written(tmp_path, 1)
    module = importlib.import_module("reloaded_sample")
    held = {"Alias": module.Alias.apply, "Decorated": module.Decorated.apply, "plain": module.plain}
    reloader = autoreload.ModuleReloader()
    reloader.enabled = reloader.check_all = True
    reloader.check(True)
    try:
        for k in (1, 2, 3):
            written(tmp_path, k)
            reloader.check(True)
            for name, call in held.items():
                now = getattr(module, name)
                wanted = {(3.0 * k, 1.0 * k if name == "plain" else 10.0 * k)}
                assert seen(call) == seen(getattr(now, "apply", now)) == wanted, (name, k)
    finally:
        del sys.modules["reloaded_sample"]
