"""The command line: every command on the repository's examples, suggestions, exit codes, plain and rich."""

from __future__ import annotations

import argparse
import ast
import errno
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fusegrad.__main__ import COMMANDS, main
from fusegrad.runtime.cache import store as cache
from fusegrad.runtime.commands import arguments, bench, doctor, output
from fusegrad.runtime.commands import cache as stored
from fusegrad.runtime.commands import crash_report as failure
from fusegrad.runtime.commands import explain as explain_command
from fusegrad.runtime.commands.arguments import TargetError, load_target, parse_argument
from fusegrad.runtime.report import terminal as screen

sys.path.insert(0, str(Path(__file__).parents[1]))
from example_arguments import EXAMPLES

ROOT = Path(__file__).resolve().parents[3]
RMS = [str(ROOT / "examples" / "rms_norm.py") + ":RMSNorm", "--args", "f32[8,16]", "f32[16]", "1e-6"]


@pytest.fixture(autouse=True)
def a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path / "cache"))


def answered(capsys: Any, *given: str, code: int = 0) -> Any:
    """The JSON of a command."""
    assert main([given[0], "--json", *given[1:]]) == code
    return json.loads(capsys.readouterr().out)


# ------------------------------------------------------------------ each command
def test_explain(capsys) -> None:
    assert main(["explain", *RMS, "--kernels", "--html", "norm.html"]) == 0
    text = capsys.readouterr().out
    assert "RMSNorm_forward" in Path("norm.html").read_text()
    assert "RMSNorm on cuda:90" in text and "@triton.jit" in text
    facts = answered(capsys, "explain", *RMS, "--gpu", "hip:gfx942")
    assert facts["name"] == "RMSNorm" and facts["target"] == "hip:gfx942"


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_explained(capsys, example) -> None:
    facts = answered(capsys, "explain", f"{ROOT}/examples/{example}", "--args", *EXAMPLES[example])
    assert facts["methods"]["forward"]["status"] == "compiled" and facts["launches"]["forward"] >= 1


def test_the_examples_are_all() -> None:
    named = {name.partition(":")[0] for name in EXAMPLES} | {"compare.py", "rms_norm.py"}
    assert {p.name for p in (ROOT / "examples").glob("*.py")} == named


def test_check(capsys) -> None:
    few = ["--transform", "backward", "--dtype", "f32", "--layout", "step 2", "--size", "3"]
    facts = answered(capsys, "check", *RMS[:1], *RMS[2:], *few)  # the arguments behind the class, too
    assert facts["ok"] and facts["counts"]["ok"] == len(facts["rows"])


def test_export(capsys, tmp_path) -> None:
    assert answered(capsys, "export", *RMS, "-o", "norm.py") == {
        "path": "norm.py", "lines": len((tmp_path / "norm.py").read_text().splitlines()),
    }  # fmt: skip
    assert main(["export", *RMS, "-o", "no/such/folder.py"]) == 1
    assert "no/such" in capsys.readouterr().err


def test_export_of_derivatives(capsys) -> None:
    ast.parse(answered(capsys, "export", *RMS)["text"])
    asked = ("--derivatives", "jvp", "--derivatives", "vmap")
    both = answered(capsys, "export", *RMS, *asked)["text"]
    assert both == answered(capsys, "export", *RMS, "--derivatives", "jvp,vmap")["text"] and "def vmap(" in both


def test_profile(capsys) -> None:
    facts = answered(capsys, "profile", *RMS, "--seconds", "0", "-o", "p.html")
    assert facts["function"] == "RMSNorm" and Path("p.html").exists()


def test_cache(capsys, tmp_path) -> None:
    for key in ("a" * 64, "b" * 64):
        cache.put(key, {"ptx": b".entry norm_forward(", "cubin": bytes(2000)})
    listed = answered(capsys, "cache", "ls")["entries"]
    assert [e["key"][0] for e in listed] == ["a", "b"] and all(e["bytes"] > 2000 for e in listed)
    assert listed[0]["what"] == "norm_forward (cubin, ptx)"
    assert answered(capsys, "cache", "dir")["root"] == str(tmp_path / "cache" / "v1")
    assert answered(capsys, "cache", "verify")["damaged"] == {}
    (Path(cache.default().directory("a" * 64)) / "cubin").write_bytes(b"other")
    assert list(answered(capsys, "cache", "verify", code=2)["damaged"]) == ["a" * 64]
    assert answered(capsys, "cache", "gc", "--limit", str(listed[1]["bytes"]))["deleted"] == 1
    assert answered(capsys, "cache", "clear")["left"] == 0
    assert answered(capsys, "cache", "ls")["entries"] == [] and cache.get("b" * 64) is None


@pytest.mark.parametrize(("text", "count"), [("200M", 200 << 20), ("1 GiB", 1 << 30), ("5", 5), ("3kB", 3072)])
def test_sizes(text, count) -> None:
    assert stored.size(text) == count


def test_doctor(capsys, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", ("reference", "triton", "interpret"))
    parts = answered(capsys, "doctor")
    states = {f["what"]: f["state"] for part in parts.values() for f in part}
    assert states["torch"] == states["reference"] == states["interpret"] == states["cross-compiling"] == "ok"
    assert parts["versions"][2]["state"] == "ok"
    assert parts["backends"][1]["state"] == ("ok" if torch.cuda.is_available() else "note")
    assert {"cache", "rich", "settings"} <= set(states)
    monkeypatch.setattr(doctor, "_agrees_with_eager", lambda backend, device: False)
    assert [f.found for f in doctor.backends() if f.what == "reference"] == ["differs from eager"]


@pytest.mark.parametrize(
    ("name", "version", "state"),
    [("torch", "2.13.0+cu130", "ok"), ("torch", "2.12.1", "note"), ("torch", "2.4.0", "fault"),
     ("triton", None, "missing")],
)  # fmt: skip
def test_versions(name, version, state) -> None:
    found = doctor._version_finding(name, version)
    assert found.state == state and (not found.fix) == (state in ("ok", "note"))


def test_the_tested_versions_are_those_of_the_constraints() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {n: pins[n] for n in ("torch", "triton")} == {n: doctor.TESTED[n] for n in ("torch", "triton")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in ("torch", "triton"):
        assert any(d.startswith(f"{name}>={doctor.LEAST[name]}") for d in project["dependencies"])
    assert project["scripts"]["fusegrad"] == "fusegrad.__main__:main" and "rich" in project["dependencies"]


def test_bench(capsys, monkeypatch, tmp_path) -> None:
    known = (ROOT / "benchmarks" / "results" / "cpu.json").read_text()
    (tmp_path / "cpu.json").write_text(known)
    assert main(["bench", "--json", "show", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "launches" in told.err and json.loads(told.out) == {"cpu": json.loads(known)}
    monkeypatch.setattr(bench, "PACKAGE", "fusegrad.no_benchmarks")
    assert main(["bench"]) == 1 and "pip install -e" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_tune_needs_a_gpu(capsys) -> None:
    assert main(["tune", *RMS]) == 1
    assert "there is no GPU" in capsys.readouterr().err


# ------------------------------------------------------------------ what may have been meant
@pytest.mark.parametrize(
    ("target", "meant"),
    [
        (f"{ROOT}/examples/rms_norm.py:RMSnorm", r"did you mean RMSNorm\? \(there are AsWritten, RMSNorm\)"),
        (f"{ROOT}/examples/rms_nrm.py:RMSNorm", r"no file .*rms_nrm\.py[^?]*did you mean rms_norm\.py\?"),
        ("fusegrad.examples.demo.function:RMSNorm", r"did you mean fusegrad\.examples\.demo\.functions\?"),
        ("fusegrad.examples.demo.functions.RMSNorm", r"write fusegrad\.examples\.demo\.functions:RMSNorm"),
        ("no_such_package_at_all.x:F", r"there is no module 'no_such_package_at_all'"),
        ("nope:F", r"fix:  write module:Class"),  # and not Python's own `opcode`
    ],
)
def test_suggestions_for_classes(target, meant) -> None:
    with pytest.raises(TargetError, match="(?s)" + meant):
        load_target(target)


def test_a_module_that_raises(tmp_path) -> None:
    (tmp_path / "broken_module_of_mine.py").write_text("import torch\nx = 1 / 0\n")
    with pytest.raises(TargetError, match=r"ZeroDivisionError.*broken_module_of_mine\.py:2"):
        load_target("broken_module_of_mine:F")
    (tmp_path / "wanting_module_of_mine.py").write_text("import no_such_library_xyz\n")
    with pytest.raises(TargetError, match="No module named 'no_such_library_xyz'"):
        load_target("wanting_module_of_mine:F")


@pytest.mark.parametrize(
    ("given", "meant"),
    [(["explian"], "did you mean explain?"), (["explain", "m:C", "--jsn"], "did you mean --json?"),
     (["cache", "lst"], "did you mean ls?"), (["check", "m:C", "--backend", "interprt"], "did you mean interpret?"),
     (["--versoin"], "did you mean --version?"),
     (["check", "m:C", "--transform", "vmp"], "did you mean vmap in_dims=0?"),
     (["export", "m:C", "--format", "grapml"], "did you mean graphml?"), (["demo", "--steps", "0"], "at least 1"),
     (["cache", "gc", "--limit", "much"], "'much' is no size; write 200M, 2G or a number of bytes")],
)  # fmt: skip
def test_mistakes_end_with_1(given, meant, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(given)
    assert stopped.value.code == 1 and meant in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [("f32[2,3]", "f32[2,3]"), ("None", None), ("1e-6", 1e-6), (" -1e-6", -1e-6), ("True", True), ("mean", "mean"),
     ("(1, 2)", (1, 2)), ("-inf", float("-inf")), ("torch.float16", torch.float16), ("'3'", "3")],
)  # fmt: skip
def test_arguments(text, value) -> None:
    assert parse_argument(text) == value and type(parse_argument(text)) is type(value)


def test_a_negative_number_is_no_option(monkeypatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(explain_command, "call_of", lambda options: seen.append(arguments.call_of(options)) or 1 / 0)
    assert main(["explain", *RMS[:2], "f32[2]", "-1e-6", "-2", "None"]) == 3
    assert seen[0][1] == ["f32[2]", -1e-6, -2, None]


def test_no_command_is_a_question_for_help(capsys) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


# ------------------------------------------------------------------ files
@pytest.mark.parametrize("command", ["explain", "check", "bisect", "profile", "export"])
@pytest.mark.parametrize(
    ("path", "fact"),
    [("no/such/x.json", "there is no folder no/such"), ("taken/x.json", "taken is a file"), ("x.jsn", ".jsn|'jsn'"),
     ("x", "a suffix is the format|its suffix is the format"), ("full.json", "the disk is full")],
)  # fmt: skip
def test_a_file_that_cannot_be_written(command, path, fact, capsys, monkeypatch) -> None:
    Path("taken").touch()
    if path.startswith("full"):
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(f"fusegrad.runtime.commands.{command}.run", raises(full))
    elif command != "export":  # which has its own way to say it
        monkeypatch.setattr(f"fusegrad.runtime.commands.{command}.run", raises(AssertionError("it has begun")))
    assert main([command, *RMS, "-o", path]) == 1
    told = capsys.readouterr().err
    assert re.search(fact, told) and f"at:   -o {path}\n" in told and "fix:" in told and "Errno" not in told


def raises(error: Exception) -> Any:
    def run(options: Any) -> Any:
        raise error

    return run


@pytest.mark.skipif(os.name != "posix" or os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(capsys) -> None:
    Path("locked").mkdir(mode=0o500)
    assert main(["explain", *RMS, "-o", "locked/x.html"]) == 1
    assert "permission is denied" in capsys.readouterr().err


def test_permission_in_words() -> None:
    options = argparse.Namespace(output=[Path("a/x.html")])
    error = output.described(options, PermissionError(errno.EACCES, "Permission denied", "a/.x.html.h9s8"))
    assert str(error).startswith("a/x.html cannot be written: permission is denied")
    missing = output.described(options, FileNotFoundError(errno.ENOENT, "No such file", "weights.bin"))
    assert str(missing).startswith("weights.bin cannot be read: there is no such file")


def test_the_suffix_is_the_format(capsys) -> None:
    assert main(["explain", *RMS, "--html", "a.html", "-o", "a.json", "-o", "a.txt"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == ["wrote a.html", "wrote a.json", "wrote a.txt"]
    assert json.loads(Path("a.json").read_text())["name"] == "RMSNorm" and "1 launch," in Path("a.txt").read_text()
    few = ["--transform", "forward", "--dtype", "f32", "--layout", "step 2", "--size", "3"]
    assert main(["check", *RMS, *few, "-o", "c.json"]) == 0 and json.loads(Path("c.json").read_text())["ok"]


def test_no_folder_for_the_cache(capsys, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path / "file"))
    assert main(["cache", "dir"]) == 0
    told = capsys.readouterr().out
    assert "Not a directory" in told and "FUSEGRAD_CACHE_DIR" in told and "Errno" not in told


def test_the_folder_of_the_cache_is_one_line(capsys, tmp_path) -> None:
    assert main(["cache", "dir"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'cache' / 'v1'}\n"


# ------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    ("words", "place", "fix"),
    [
        (["export", *RMS, "--derivatives", "jvp,hessian"], "--derivatives jvp,hessian", "one of jvp, vmap"),
        (["export", *RMS, "--derivatives", "vmp"], "--derivatives vmp", "did you mean vmap?"),
        (["export", *RMS, "-o", "x.grapml"], "-o x.grapml", "did you mean graphml?"),
        (["explain", *RMS, "--target", "490"], "--target 490", "did you mean 4090?"),
        (["profile", *RMS, "--gpu=490"], "--gpu 490", "did you mean 4090?"),
        (["explain", *RMS[:2], "f32[8", "f32[16]", "1e-6"], "'f32[8'", "write dtype"),
        (["explain", "no.py:Norm"], "no.py:Norm", "write module:Class"),
    ],
)
def test_the_place_is_the_argument(words, place, fix, capsys) -> None:
    assert main(words) == 1
    told = capsys.readouterr().err
    assert f"\n  at:   {place}\n" in told and fix in told


def test_misspelt_variables_are_told() -> None:
    misspelt = {"BACKEDN": "interpret", "DISABLE": "fusee", "OF_MINE": "1"}
    environment = {**os.environ, **{f"FUSEGRAD_{name}": value for name, value in misspelt.items()}}
    words = [sys.executable, "-m", "fusegrad", "explain", *RMS]
    found = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert found.returncode == 1 and "FUSEGRAD_BACKEDN in the environment sets nothing; did you mean" in found.stderr
    assert "at:   FUSEGRAD_DISABLE=fusee in the environment\n  fix:  did you mean fuse?" in found.stderr
    assert "Traceback" not in found.stderr and "OF_MINE" not in found.stderr


def test_errors_as_json(capsys) -> None:
    error = answered(capsys, "explain", *RMS, "--gpu", "cuda:42", code=1)["error"]
    assert (error["class"], error["code"]) == ("UnknownTargetError", "FG211") and "[FG211]" in error["message"]


def test_an_internal_error_leaves_a_file_that_shows_it(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fusegrad.runtime.report.explain._on_gpu", lambda *_: 1 / 0)
    assert main(["explain", *RMS]) == 3
    told = capsys.readouterr().err
    (path,) = tmp_path.glob("fusegrad-error-explain-*.py")
    assert f"written: {path}" in told and "ZeroDivisionError" in told
    text = path.read_text()
    assert "torch 2." in text and "# Traceback" in text and "fusegrad.explain(RMSNorm, 'f32[8,16]'" in text
    with pytest.raises(ZeroDivisionError):
        exec(compile(text, str(path), "exec"), {"__name__": "reproducer"})
    assert set(failure.CALLS) <= {*COMMANDS, "tune"}


def test_a_class_that_cannot_be_had_leaves_the_command_line(monkeypatch) -> None:
    monkeypatch.setattr(explain_command, "call_of", lambda options: 1 / 0)
    monkeypatch.setattr(failure, "call_of", lambda options: 1 / 0)
    assert main(["explain", "m:C"]) == 3
    (path,) = Path().glob("fusegrad-error-explain-*.py")
    assert "main(['explain', 'm:C'])" in path.read_text()


def test_a_pipe_that_is_closed_is_no_error(monkeypatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            return spare.fileno()

    with open("spare", "w") as spare:
        monkeypatch.setattr(sys, "stdout", Closed())
        assert main(["cache", "dir"]) == 0


# ------------------------------------------------------------------ the screen
class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(*blocks: screen.Block) -> str:
    terminal = Terminal()
    screen.show(blocks, terminal)
    return terminal.getvalue()


TABLE = screen.Table("times", ("name", "us"), [("forward [red]", "1,234.5"), ("b", "7")])


def test_plain_and_rich(monkeypatch) -> None:
    text = "times\n  name           us\n  forward [red]  1,234.5\n  b                    7"
    assert screen.plain(TABLE) == text
    piped = io.StringIO()
    screen.show([TABLE, "done"], piped)
    assert piped.getvalue() == text + "\ndone\n"
    monkeypatch.setenv("TERM", "xterm-256color")
    rich = printed(TABLE, "done [green]")
    assert "\x1b[1m" in rich and "┃" in rich and "forward [red]" in rich and "done [green]" in rich
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in printed(TABLE) and printed(TABLE) == text + "\n"


def test_without_rich_it_is_plain(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in [n for n in sys.modules if n.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert printed(TABLE) == screen.plain(TABLE) + "\n"


def bar(steps: Sequence[str], stream: io.StringIO, monkeypatch: Any) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with screen.progress(len(steps), "profile") as advance:
        for step in steps:
            advance(step)
    return stream.getvalue()


def test_progress(monkeypatch) -> None:
    assert bar(["forward", "backward"], io.StringIO(), monkeypatch) == ""
    monkeypatch.setenv("TERM", "xterm")
    assert "backward" in bar(["forward", "backward"], Terminal(), monkeypatch)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert bar(["forward"], Terminal(), monkeypatch) == "profile 1/1: forward\n"
