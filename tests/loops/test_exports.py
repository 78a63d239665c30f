"""Exports of loops: right at every length that they take, an error at others, refused where a long loop is another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loops.recurrences import MovingAverage
from loops.turning import TURNING

pytest.importorskip("triton")

import fusegrad
from fusegrad.runtime.export.gather.loop_lengths import LONGEST

EXPORTED, SERVED, REFUSED = 24, (24, 3, 40), (0, 1, 2, LONGEST + 1)
ROOT = str(Path(__file__).parents[1])


def argument(steps: int) -> torch.Tensor:
    torch.manual_seed(steps)
    return torch.randn(steps, 5, requires_grad=True)


def outcome(function: Any, steps: int) -> list[torch.Tensor]:
    x = argument(steps)
    out = function(x, 0.9)
    return [out, *torch.autograd.grad(out.sin().sum(), x)]


def bundle(tmp_path: Path) -> None:
    """Loaded again: bit by bit, and nothing beyond what was compared."""
    fusegrad.export(MovingAverage, argument(EXPORTED), 0.9, path=tmp_path / "average.zip")
    loaded = fusegrad.load(tmp_path / "average.zip")
    for steps in SERVED:
        assert all(map(torch.equal, outcome(loaded.apply, steps), outcome(MovingAverage.apply, steps)))
    for steps in REFUSED:
        with pytest.raises(fusegrad.FusegradError, match="it was exported for"):
            loaded.apply(argument(steps), 0.9)


MODULE = """
import sys, torch
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import average
from loops import test_exports as t
mine, users = average.MovingAverage.apply, t.MovingAverage.apply
for steps in t.SERVED:
    for a, b in zip(t.outcome(mine, steps), t.outcome(users, steps), strict=True):
        torch.testing.assert_close(a, b)
for steps in t.REFUSED:
    try:
        mine(t.argument(steps), 0.9)
    except ValueError as error:
        assert "was exported for sizes" in str(error)
    else:
        raise AssertionError(f"{steps} steps are not refused")
"""


def module(tmp_path: Path) -> None:
    """In a process of its own, under the interpreter."""
    text = fusegrad.export(MovingAverage, argument(EXPORTED), 0.9, path=tmp_path / "average.py")
    assert f"<= {LONGEST}" in text and "**ROOMY" in text
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", MODULE, ROOT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def pair(tmp_path: Path) -> None:
    """C++, which is not compiled here: the condition is in its checks."""
    fusegrad.export(MovingAverage, argument(EXPORTED), 0.9, path=tmp_path / "average.cpp")
    checks = [line for line in (tmp_path / "average.cpp").read_text().splitlines() if f"<= {LONGEST}" in line]
    assert any("TORCH_CHECK_VALUE" in line for line in checks)


def program(tmp_path: Path) -> None:
    """torch.export knows no loop: its programs have all steps."""
    fusegrad.export(MovingAverage, argument(EXPORTED), 0.9, path=tmp_path / "average.pt2")
    program = torch.export.load(tmp_path / "average.pt2").module()
    x = torch.randn(EXPORTED, 5)
    assert torch.equal(program(x), MovingAverage.apply(x, 0.9))
    for steps in (1, 2, EXPORTED - 1, EXPORTED + 1):
        with pytest.raises(RuntimeError, match="Expected input"):
            program(torch.randn(steps, 5))


@pytest.mark.parametrize("form", [bundle, module, pair, program], ids=lambda f: f.__name__)
def test_an_export_is_right_or_refuses(form: Any, tmp_path: Path) -> None:
    form(tmp_path)


@pytest.mark.parametrize("suffix", ["py", "cpp", "zip", "pt2"])
@pytest.mark.parametrize("cls", TURNING, ids=lambda c: c.__name__)
def test_what_only_a_long_loop_does_is_refused(cls: Any, suffix: str, tmp_path: Path) -> None:
    with pytest.raises(fusegrad.FusegradError, match="at 40 steps not what it is at few"):
        fusegrad.export(cls, torch.randn(12, 3, requires_grad=True), path=tmp_path / f"turns.{suffix}")


def test_a_loop_that_made_up_numbers_do_not_fit_is_refused(tmp_path: Path) -> None:
    class Strict(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            h = torch.zeros_like(x[0])
            for t in range(x.shape[0]):
                h = torch.sin(h) + x[t].index_select(0, at + 2)
            return h

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return None, None

    with pytest.raises(fusegrad.FusegradError, match="cannot be compared"):
        fusegrad.export(Strict, "f32[12,2]", "i64[2]", path=tmp_path / "strict.py")
