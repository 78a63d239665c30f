"""`fusegrad.bisect` names planted faults: of a capture, a rule, a pass, a division, an emitted line, a call."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.__main__ import main
from fusegrad.codegen.emit import mathematics
from fusegrad.ir import Graph, emit
from fusegrad.ir.passes import fuse, simplify
from fusegrad.ir.rewrite import X, make, rebuild, rules
from fusegrad.runtime.bisect import search
from fusegrad.runtime.execution import graph_to_kernels as pipeline
from fusegrad.runtime.execution.aten import replay
from fusegrad.runtime.settings import config
from fusegrad.runtime.specialize import residuals
from fusegrad.tracer.capture.capture import Session

Tensor = torch.Tensor
aten = torch.ops.aten
HERE = Path(__file__).name


class Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        y = torch.neg(-(x * rstd))
        ctx.save_for_backward(x, y, y * 0.5)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, y, half = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return (g - y * (g * y).mean(-1, keepdim=True)) * gate + half * g


ARGS = ("f32[3,5]",)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions of the generator are not tried one by one."""
    monkeypatch.setattr(search, "SECONDS", 0.0)


def found(backend: str = "interpret", *modes: str, target: Any = Norm) -> search.Bisection:
    return fusegrad.bisect(target, *ARGS, backend=backend, transforms=modes or ("forward", "backward"), quiet=True)


def line(text: str) -> str:
    """`file:line` of this module's first line with this text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{HERE}:{next(i for i, known in enumerate(lines, 1) if text in known)}"


def swapped(graph: Graph, old: str, new: str) -> Graph:
    """Every node of one primitive made another."""
    wrong = {v.id: lambda env, v=v: emit(new, *(env[a.id] for a in v.args)) for v in graph.order() if v.prim == old}
    return rebuild(graph, {}, wrong)


# ------------------------------------------------------------------ nothing is wrong
@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_no_difference(backend: str) -> None:
    report = found(backend)
    assert report.ok and report.culprit is None and not report.script
    assert str(report) == f"bisect(Norm) on {backend}: no difference in forward, backward"


# ------------------------------------------------------------------ planted
def plant_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Session.trace

    def wrong(self: Session, *args: Any, **kwargs: Any) -> Any:
        trace = real(self, *args, **kwargs)
        for node in trace.graph_module.graph.nodes:
            node.target = aten.tanh.default if node.target is aten.sigmoid.default else node.target
        trace.graph_module.recompile()
        return trace

    monkeypatch.setattr(Session, "trace", wrong)


def plant_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline.lower
    monkeypatch.setattr(pipeline, "lower", lambda *a, **k: swapped(real(*a, **k), "sigmoid", "tanh"))


def plant_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = rules((simplify.neg(simplify.neg(X)), lambda x: make("neg", x)))
    monkeypatch.setitem(simplify.FAMILIES, "algebra", wrong)
    simplify.rules_without.cache_clear()


def plant_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pipeline.PASSES, "contract", lambda graph: swapped(graph, "rsqrt", "sqrt"))


def plant_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: Graph) -> Graph:
        raise IndexError("no such axis")

    monkeypatch.setitem(pipeline.PASSES, "contract", wrong)


def plant_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    real = residuals.apply_choice
    monkeypatch.setattr(residuals, "apply_choice", lambda *a: swapped(real(*a), "sigmoid", "tanh"))


def plant_division(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fuse.extract
    monkeypatch.setattr(fuse, "extract", lambda *a, **k: swapped(real(*a, **k), "rsqrt", "sqrt"))


def plant_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mathematics.rules, "sigmoid", mathematics.rules["tanh"])


def plant_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    real = replay.bind_operations

    def wrong(nodes: Any) -> Any:
        return {n: torch.tanh if n.target is aten.sigmoid.default else way for n, way in real(nodes).items()}

    monkeypatch.setattr(replay, "bind_operations", wrong)
    monkeypatch.setattr("fusegrad.runtime.bisect.localize.bind_operations", wrong)


GATE, RSTD = "gate = torch.sigmoid(x)", "rstd = torch.rsqrt("
PLANTED: dict[str, tuple[Callable[[Any], None], str, str, str, str]] = {  # name: plant, backend, mode, what, line
    "capture": (plant_capture, "reference", "backward", "sigmoid", GATE),
    "lower": (plant_lower, "interpret", "backward", "gate = tanh(x)", GATE),
    "rule": (plant_rule, "interpret", "forward", "algebra on Norm_forward: y = neg(", "y = torch.neg("),
    "contract": (plant_pass, "interpret", "forward", "rstd = sqrt(", RSTD),
    "recompute": (plant_recompute, "interpret", "backward", "kept for backward", ""),
    "divide": (plant_division, "interpret", "forward", "Norm_forward, ", "y = torch.neg("),
    "kernels": (plant_emitted, "interpret", "backward", "kernel Norm_backward): gate = sigmoid(x)", GATE),
    "kernels jvp": (plant_emitted, "interpret", "jvp", "sigmoid(x)", ""),
    "binding": (plant_binding, "reference", "backward", "aten.sigmoid.default", GATE),
}


@pytest.mark.parametrize("name", PLANTED)
def test_names_what_was_planted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, backend, mode, what, source = PLANTED[name]
    plant(monkeypatch)
    report = found(backend, *(("forward", "backward") if mode != "jvp" else ("jvp",)))
    simplify.rules_without.cache_clear()
    own = report.culprit
    assert own is not None and (own.kind, report.mode) == (name.split()[0], mode), report
    assert what in own.what, own
    assert not source or (line(source) in own.where and "got" in own.values), own


def test_a_step_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_raise(monkeypatch)
    report = found()
    assert report.culprit is not None and report.culprit.kind == "contract" and "IndexError" in report.difference
    assert report.culprit.avoid == "fusegrad.config.patch(disable=('contract',))"


# ------------------------------------------------------------------ the command
SUBJECT = '''import torch
import fusegrad
from fusegrad.codegen.emit import mathematics

mathematics.rules["sigmoid"] = mathematics.rules["tanh"]


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x
'''


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted_gate.py").write_text(SUBJECT)
    monkeypatch.setitem(mathematics.rules, "sigmoid", mathematics.rules["sigmoid"])  # what importing it changes
    monkeypatch.syspath_prepend(str(tmp_path))
    given = ["bisect", f"{tmp_path}/planted_gate.py:Gate", "f32[4]", "--transform", "forward"]
    out = tmp_path / "shown.py"
    assert main([*given, "--backend", "interpret", "-o", str(out)]) == 2
    assert "first wrong step: the kernels of a group, Gate_forward" in capsys.readouterr().out
    assert main([*given, "--backend", "reference", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert main(["bisect", "no_such_module:Gate", "f32[4]"]) == 1
    with config.patch(), pytest.raises(AssertionError):  # which ends what the script patches
        runpy.run_path(str(out), run_name="__main__")
