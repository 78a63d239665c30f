"""Code that does not know fusegrad, run with every Function class compiled as it is defined: nothing new fails."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.runtime.integrations.compile_everything import every_function, summary

THIRD_PARTY = Path(__file__).parent / "third_party.py"
PLUGIN = ("-p", "fusegrad.runtime.pytest_plugin")
_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR) \S*?(::\S+)", re.MULTILINE)


@functools.cache
def outcomes(*options: str) -> tuple[dict[str, str], str]:
    """{test: outcome} of the third party's tests in a process of their own, and what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
    done = subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir", str(THIRD_PARTY.parent), *options, str(THIRD_PARTY)],
        capture_output=True, text=True, timeout=280, env={**os.environ, "FUSEGRAD_TESTS": "all"},
    )  # fmt: skip
    return {test: status for status, test in _OUTCOME.findall(done.stdout)}, done.stdout + done.stderr


def test_a_third_partys_tests_show_no_new_failure() -> None:
    before, printed = outcomes()
    assert len(before) == 17 and sum(s == "FAILED" for s in before.values()) == 2, printed
    for backend in ("reference", "interpret"):
        after, printed = outcomes(*PLUGIN, f"--fusegrad={backend}")
        assert after == before, printed
        told = re.search(r"fusegrad: (\d+) Function classes defined, (\d+) called, (\d+) compiled", printed)
        assert told is not None and tuple(map(int, told.groups())) == (8, 8, 8), printed
        assert "in part: third_party.Sine.forward: it leaves torch" in printed


def test_without_the_option_the_plugin_changes_nothing() -> None:
    before, _ = outcomes()
    after, printed = outcomes(*PLUGIN)
    assert after == before and "fusegrad:" not in printed


def test_an_unknown_backend_is_named() -> None:
    _, printed = outcomes(*PLUGIN, "--fusegrad=warp")
    assert "there is no backend 'warp'" in printed


def define() -> Any:
    class Twice(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    return Twice


def test_the_block_restores_what_it_changed() -> None:
    attributes = dict(vars(Function))
    with every_function("reference") as everywhere:
        cls = define()
        early = cls.apply
        x = torch.randn(3, requires_grad=True)
        early(x).sum().backward()
        assert everywhere.seen[0].records["backward"].status == "compiled"
    assert dict(vars(Function)) == attributes
    assert "apply" not in vars(cls) and not any(name.startswith("_fusegrad") for name in vars(cls))
    before = fusegrad.stats()["captures"]
    assert torch.equal(early(torch.arange(7.0)), cls.apply(torch.arange(7.0)))
    assert fusegrad.stats()["captures"] == before


def test_a_class_that_calls_another_is_captured() -> None:
    """Whose twin is made only then, and noted on the other class."""
    with every_function("reference") as everywhere:
        cls = define()

        class Outer(Function):
            @staticmethod
            def forward(ctx, x):
                return cls.apply(x) + 1

            @staticmethod
            def backward(ctx, g):
                return cls.apply(g)

        x = torch.randn(3, requires_grad=True)
        Outer.apply(x).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0))
        records = next(seen.records for seen in everywhere.seen if seen.name.endswith("Outer"))
        assert [records[method].status for method in ("forward", "backward")] == ["compiled", "compiled"]


def test_classes_from_before_and_torchs_own_are_left_alone() -> None:
    cls = define()
    with every_function("reference") as everywhere:
        x = torch.randn(3, requires_grad=True)
        cls.apply(x)
        torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True).sum().backward()
    assert everywhere.seen == []


def test_an_exception_restores_too() -> None:
    with pytest.raises(KeyError), every_function():
        raise KeyError
    assert "__init_subclass__" not in vars(Function)


def test_the_summary_tells_reasons() -> None:
    with every_function("reference") as everywhere:
        cls = define()

        class Sets(Function):
            @staticmethod
            def forward(ctx, x):
                return {x * 2}

        with pytest.warns(fusegrad.FallbackWarning):
            Sets.apply(torch.ones(2))
    text = summary(everywhere)
    assert cls is not None and text.startswith("fusegrad: 2 Function classes defined, 1 called, 0 compiled")
    assert "Sets.forward: it returns a set" in text and "test_everywhere.py" in text


def test_a_hook_that_was_there_still_runs() -> None:
    class Root(Function):
        met: ClassVar[list[str]] = []

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            Root.met.append(cls.__name__)

    with every_function("reference") as everywhere:

        class Leaf(Root):
            @staticmethod
            def forward(ctx, x):
                return x + 1

        Leaf.apply(torch.ones(2))
    assert Root.met[0] == "Leaf" and everywhere.seen[0].called


def test_what_waits_for_more_calls_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegrad.runtime.compiled.budget._families", {})
    monkeypatch.setattr("fusegrad.runtime.compiled.budget.FAMILY", 10)

    def anew() -> Any:
        class Anew(Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return grad * 3

        return Anew

    with pytest.warns(fusegrad.FallbackWarning, match="FG055"), every_function() as everywhere:
        for _ in range(4):
            x = torch.ones(2, requires_grad=True)
            anew().apply(x).sum().backward()
            assert x.grad is not None and x.grad.tolist() == [3.0, 3.0]
    assert "Anew.forward: it was traced for class after class" in summary(everywhere)
