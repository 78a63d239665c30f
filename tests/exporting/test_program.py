"""The exported program: forward's values without fusegrad, and the backward that was written, never another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.runtime.export.gather.gathered import ExportError
from fusegrad.runtime.export.torch_export.program import NOTE


class Steep(Function):
    """A gradient that is no derivative of forward (straight-through, times seven), and a saved value in between."""

    @staticmethod
    def forward(ctx, x, w, scale, name):
        z = (x * w).round()
        ctx.save_for_backward(z, w)
        return z * scale, z.sum(0).half(), None

    @staticmethod
    def backward(ctx, g, h, _):
        z, w = ctx.saved_tensors
        given = 7 * g + h.float()
        return given * w, (given * z).sum(0), None, None


class Counts(Function):
    """Integers alone come out: nothing to differentiate, so that no backward is written."""

    @staticmethod
    def forward(x):
        return (x > 0).sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


RUN = """
import sys, torch
sys.modules["fusegrad"] = None  # importing it is an error
forward, backward, given, out = sys.argv[1:]
x, w, g, h = torch.load(given)
note = {"fusegrad.json": ""}
program = torch.export.load(forward, extra_files=note).module()
values = program(x, w)
said = []
for call in (lambda: program(x.clone().requires_grad_(), w)[0].sum().backward(),
             lambda: torch.export.load(forward).run_decompositions().module()(
                 x.clone().requires_grad_(), w)[0].sum().backward()):
    try:
        call()
    except RuntimeError as error:
        said.append(str(error).splitlines()[0])
gradients = torch.export.load(backward).module()(x, w, g, h)
torch.save((values, gradients, said, note["fusegrad.json"]), out)
"""


def test_values_and_the_written_backward_in_another_process(tmp_path: Path) -> None:
    said = fusegrad.export(Steep, "f32[8,16]", "f32[16]", 2.5, "a", path=tmp_path / "steep.pt2")
    assert "torch.export keeps no custom backward" in said and "steep.backward.pt2" in said
    torch.manual_seed(0)
    x, w = torch.randn(5, 16), torch.randn(16)
    values = Steep.apply(x.requires_grad_(), w.requires_grad_(), 2.5, "a")
    g, h = torch.randn(5, 16), torch.randn(16).half()
    gradients = torch.autograd.grad(values[:2], (x, w), (g, h))
    given, out = tmp_path / "given", tmp_path / "out"
    torch.save((x.detach(), w.detach(), g, h), given)
    files = [str(tmp_path / n) for n in ("steep.pt2", "steep.backward.pt2")]
    assert all(torch.export.load(f).example_inputs is None for f in files)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, *files, str(given), str(out)],
        capture_output=True, text=True, env=env, cwd=tmp_path, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found, pulled, errors, note = torch.load(out)
    assert torch.equal(found[0], values[0]) and torch.equal(found[1], values[1]) and found[2] is None
    for ours, theirs in zip(pulled, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert len(errors) == 2 and all("does not require grad" in e for e in errors)
    assert json.loads(note)["kept"] == said and NOTE == "fusegrad.json"


def test_without_a_backward_there_is_one_file(tmp_path: Path) -> None:
    said = fusegrad.export(Counts, "f32[8,16]", path=tmp_path / "counts.pt2")
    assert [p.name for p in tmp_path.iterdir()] == ["counts.pt2"] and "backward.pt2" not in said
    x = torch.randn(3, 16)
    assert torch.equal(torch.export.load(tmp_path / "counts.pt2").module()(x), (x > 0).sum(-1))


class Writes(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Speaks(Function):
    """It returns a word, which torch would write and could not read."""

    @staticmethod
    def forward(ctx, x):
        return x * 2, "a word"

    @staticmethod
    def backward(ctx, g, _):
        return g * 2


@pytest.mark.parametrize(("cls", "said"), [(Writes, "writes to an argument"), (Speaks, "returns a str")])
def test_what_a_program_cannot_hold(cls: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=said):
        fusegrad.export(cls, "f32[8,16]", path=tmp_path / "no.pt2")
    assert list(tmp_path.iterdir()) == []


def test_torch_still_drops_the_custom_backward() -> None:
    """Why the program raises: when this fails, torch keeps it, and the export should."""

    class Plain(torch.nn.Module):
        def forward(self, x):
            return Steep.apply(x, torch.ones(16), 1.0, "a")[0]

    x = torch.randn(8, 16, requires_grad=True)
    program = torch.export.export(Plain(), (x,), strict=False).module()
    (gradient,) = torch.autograd.grad(program(x).sum(), x)
    assert not torch.equal(gradient, torch.full_like(x, 7.0))
