"""Every script under examples/ runs, agrees with eager, is compiled as a whole, and has a right backward."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegrad

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.name != "compare.py")


def numbers(*shape: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=seeded).requires_grad_()


TARGET = torch.tensor([3, -100, 0, 6])
DIFFERENTIABLE: dict[str, tuple[Any, ...]] = {
    "add_rms_norm": (numbers(4, 7), numbers(4, 7), numbers(7), 1e-6),
    "cross_entropy": (numbers(4, 7), TARGET, -100, 0.1, 1e-2),
    "focal_loss": (numbers(4, 7), numbers(4, 7) > 0, 0.25, 2.0),
    "layer_norm": (numbers(4, 7), numbers(7), numbers(7), 1e-5),
    "masked_softmax": (numbers(7, 7), torch.ones(7, 7, dtype=torch.bool).tril()),
    "rms_norm": (numbers(4, 7), numbers(7), 1e-6),
    "rope": (numbers(2, 4, 6), numbers(4, 3).detach(), numbers(4, 3).detach()),
    "swiglu": (numbers(4, 7), numbers(4, 7)),
}
"""Arguments for finite differences, for the classes whose backward is the derivative of their forward."""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in [*SCRIPTS, "compare"]:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("script", SCRIPTS)
def test_example_agrees_with_eager(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", fusegrad.FallbackWarning)
        importlib.import_module(script).main()
    shown = capsys.readouterr().out
    assert "reference" in shown and "interpret" in shown


@pytest.mark.parametrize("script", DIFFERENTIABLE)
def test_backward_is_the_derivative(script: str) -> None:
    written = importlib.import_module(script).AsWritten
    assert torch.autograd.gradcheck(written.apply, DIFFERENTIABLE[script])


def test_an_example_is_a_script() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / "swiglu.py")], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "interpret" in done.stdout


def test_the_index_lists_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{script}.py`" in text for script in SCRIPTS)
