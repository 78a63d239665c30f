"""What is imported, and when: nothing heavy by `import fusegrad`, no torch by a command that needs none."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import fusegrad
from fusegrad.__main__ import COMMANDS, main, module_of

HEAVY = ("triton", "sympy", "networkx", "torch._dynamo", "torch.distributed", "torch._inductor", "torch.onnx")
MOST = 12
"""Modules of this package that `import fusegrad` loads: of 440."""


def imported_by(program: str) -> set[str]:
    """The modules that a program has loaded at its end; it prints nothing else."""
    script = f"{program}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_the_import_loads_no_torch() -> None:
    loaded = imported_by("import fusegrad")
    assert "torch" not in loaded and loaded.isdisjoint(HEAVY)
    assert len([m for m in loaded if m.partition(".")[0] == "fusegrad"]) <= MOST


def test_the_import_adds_nothing_heavy_to_torch() -> None:
    alone, both = imported_by("import torch"), imported_by("import torch\nimport fusegrad")
    added = both - alone
    assert added.isdisjoint(HEAVY) and len(added) <= MOST + 10, sorted(added)
    assert {m.partition(".")[0] for m in added} <= {"fusegrad", *sys.stdlib_module_names}


def test_the_first_name_loads_what_it_needs() -> None:
    loaded = imported_by("import fusegrad\nfusegrad.compile")
    assert {"torch", "fusegrad.runtime.api"} <= loaded
    assert "torch" not in imported_by("import fusegrad\nfusegrad.config.patch(debug=True)")


QUIET = {
    "--version": 0, "--help": 0, "cache dir": 0, "cache --help": 0,
    "chekc x": 1, "cache --limitt 3": 1, "cache dirr": 1,
}  # fmt: skip


@pytest.mark.parametrize("line", QUIET)
def test_a_command_without_a_function_loads_no_torch(line: str) -> None:
    run = f"""
import contextlib, io
from fusegrad.__main__ import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    try:
        code = main({line.split()!r})
    except SystemExit as end:
        code = end.code or 0
assert code == {QUIET[line]}, code"""
    loaded = imported_by(run)
    assert "torch" not in loaded and loaded.isdisjoint(HEAVY)


def test_help_lists_every_command_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {summary}" in text for name, summary in COMMANDS.items())
    assert all(callable(module_of(name).run) and callable(module_of(name).add_arguments) for name in COMMANDS)


def test_every_public_name_is_there() -> None:
    assert all(getattr(fusegrad, name) is not None for name in fusegrad.__all__)
    assert set(fusegrad.__all__) <= set(dir(fusegrad))
    with pytest.raises(AttributeError, match="no attribute 'compiel'"):
        fusegrad.compiel  # noqa: B018


def test_rooms_are_there_without_an_import_of_their_own() -> None:
    used = "fusegrad.ir.Graph, fusegrad.tracer, fusegrad.codegen.Kernel, fusegrad.runtime"
    loaded = imported_by(f"import fusegrad\n{used}")
    assert {"fusegrad.ir.graph", "fusegrad.codegen", "fusegrad.tracer", "fusegrad.runtime"} <= loaded


@pytest.mark.parametrize("mode", ["torch.device('meta')", "Refusing()"])
def test_the_first_name_may_be_asked_for_within_a_mode(mode: str) -> None:
    run = f"""
import torch, fusegrad
from torch.utils._python_dispatch import TorchDispatchMode
class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise RuntimeError("an operation within a mode of the user's")
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, g):
        return g * 2
with {mode}:
    fast = fusegrad.compile(Twice)
assert fast.apply(torch.ones(2)).tolist() == [2.0, 2.0]"""
    assert "fusegrad.runtime.api" in imported_by(run)


def test_a_pickle_may_be_the_first_that_asks(tmp_path: Path) -> None:
    (tmp_path / "pickled_twice.py").write_text(
        "from torch.autograd import Function\n\n\nclass Twice(Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        return x * 2\n\n"
        "    @staticmethod\n    def backward(ctx, g):\n        return g * 2\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        import pickled_twice

        data = pickle.dumps(fusegrad.compile(pickled_twice.Twice))
    finally:
        sys.path.remove(str(tmp_path))
    run = f"""
import pickle, sys
sys.path.insert(0, {str(tmp_path)!r})
fast = pickle.loads({data!r})
import torch
assert fast.apply(torch.ones(2)).tolist() == [2.0, 2.0] and hasattr(fast, "_fusegrad")"""
    assert "fusegrad.runtime.dispatch.compiled_class" in imported_by(run)
