"""The exercises of CONTRIBUTING.md: each block runs in a fresh process, and keeps what its section promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXERCISES = dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE))
MOST_LINES = 30

CLASSES = """
import fusegrad
import torch
from torch.func import grad, jvp, vmap

class Tail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.erfc(x) * 2.0

    @staticmethod
    def backward(ctx, g):  # no derivative of forward: what runs has to be this
        (x,) = ctx.saved_tensors
        return g * torch.erfc(x)

x = torch.linspace(-2, 2, 24).reshape(4, 6)
"""
CHECKS = {
    "A primitive": """
found = fusegrad.explain(Tail, "f32[4,6]")
for direction, report in found.directions.items():
    assert [k.kind for k in report.launches] == ["triton"], (direction, report.launches)
    assert "libdevice.erfc" in report.launches[0].source
slope = lambda x: -2 / torch.pi**0.5 * torch.exp(-x * x)
for backend in ("reference", "interpret"):
    Fast = fusegrad.compile(Tail, backend=backend, fullgraph=True)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(Fast.apply(leaf).sum(), leaf)
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    close(Fast.apply(x), torch.erfc(x) * 2)
    close(gradient, torch.erfc(x))
    close(vmap(Fast.apply)(x), torch.erfc(x) * 2)
    close(vmap(grad(lambda row: Fast.apply(row).sum()))(x), torch.erfc(x))
    close(grad(lambda x: grad(lambda x: Fast.apply(x).sum())(x).sum())(x), slope(x))
    close(jvp(grad(lambda x: Fast.apply(x).sum()), (x,), (torch.ones_like(x),))[1], slope(x))
    assert {r.status for r in Fast._fusegrad.ledger.records.values()} == {"compiled"}
assert "libdevice.erfc" in fusegrad.export(Tail, "f32[4,6]", format="py")
assert "at::erfc(x)" in fusegrad.export(Tail, "f32[4,6]", format="cpp")
""",
    "A pass": """
from fusegrad import config

def prims(direction="forward"):
    found = fusegrad.explain(Tail, "f32[4,6]")
    return {v.prim for v in found.graph(direction).order()}, found.directions[direction].launches

values, (_, kernel) = prims()
assert "add" in values and "mul" not in values and " + " in kernel.source
with config.patch(disable="doubles"):
    values, (_, kernel) = prims()
assert "mul" in values and "add" not in values and " * 2.0" in kernel.source
Fast = fusegrad.compile(Tail, backend="interpret")
assert Fast.apply(x).equal(torch.erfc(x) * 2)
""",
    "An export format": """
import sys
from pathlib import Path

from fusegrad.__main__ import main

text = fusegrad.export(Tail, "f32[4,6]", format="csv")
assert text.splitlines()[0] == "launch,read,written" and "Tail_forward,96,96" in text
assert fusegrad.export(Tail, "f32[4,6]", path="launches.csv") == text == Path("launches.csv").read_text()
Path("tail.py").write_text("import torch\\n" + SOURCE)
assert main(["export", "tail.py:Tail", "f32[4,6]", "-o", "others.csv"]) == 0
assert Path("others.csv").read_text() == text
""",
}


def test_the_page_has_the_exercises() -> None:
    assert list(EXERCISES) == list(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_an_exercise_is_short(name: str) -> None:
    section = re.search(rf"^### {name}\n(.*?)^###", PAGE, re.DOTALL | re.MULTILINE)
    assert section is not None
    assert len(section[1].strip().splitlines()) < MOST_LINES


@pytest.mark.parametrize("name", CHECKS)
def test_an_exercise_keeps_its_promise(name: str, tmp_path: Path) -> None:
    """The block alone, then a class that is compiled with what it added."""
    source = CLASSES[CLASSES.index("class Tail") : CLASSES.index("\nx = ")]
    script = tmp_path / "exercise.py"
    script.write_text(f"{EXERCISES[name]}\nSOURCE = {source!r}\n{CLASSES}{CHECKS[name]}", encoding="utf-8")
    environment = {**os.environ, "FUSEGRAD_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
