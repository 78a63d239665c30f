"""What is released: versions that were tried, what a wheel holds, extras, and a template for each kind of report."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import dist
import matrix
import pytest

from fusegrad.__main__ import COMMANDS
from fusegrad.ir import versions

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


# ------------------------------------------------------------------ versions
def test_the_pinned_pair_is_one_that_was_tried_and_each_is_on_its_page() -> None:
    pins = dict(re.findall(r"^(torch|triton)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    assert (pins["torch"], pins["triton"]) in versions.TRIED
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    for torch, triton in versions.TRIED:
        assert re.search(rf"^\| {re.escape(torch)} \| {re.escape(triton)} \|", page, re.M)
    least = {name: f"{name}>={version}" for name, version in versions.LEAST.items()}
    assert all(any(d.startswith(text) for d in PROJECT["dependencies"]) for text in least.values())


@pytest.mark.parametrize(("found", "fits"), [("2.10.1", False), ("2.11.0", True), ("2.13.0+cpu", True), ("3.0.1", True),
                                             ("2.9.0a0+git1", False)])  # fmt: skip
def test_what_is_too_old_is_refused_by_name(found: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda name: found if name == "torch" else None)
    if fits:
        versions.require_versions()
        return
    with pytest.raises(versions.VersionError, match=f"torch {re.escape(found)}: it is older than 2.11") as error:
        versions.require_versions()
    assert isinstance(error.value, ImportError) and "torch 2.13.0 with triton 3.7.1" in str(error.value)


def test_importing_the_package_asks_first(tmp_path: Path) -> None:
    """Beside an old torch the error is ours, and not one of a name that torch lacks."""
    package = tmp_path / "torch-2.4.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.4.0\n", encoding="utf-8")
    source = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fusegrad"
    told = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert told.returncode == 1 and "VersionError: fusegrad does not work with torch 2.4.0" in told.stderr
    assert "import torch" not in told.stderr


def test_a_failed_import_under_a_version_that_nobody_tried_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ImportError("cannot import name 'x' from 'torch'")
    monkeypatch.setattr(versions, "installed_version", lambda name: "2.13.0+cpu")
    assert versions.explain_import_error(error) is error
    monkeypatch.setattr(versions, "installed_version", lambda name: "9.9.0")
    explained = str(versions.explain_import_error(error))
    assert "torch 9.9.0: this version was never tried, and the import failed: cannot" in explained


def test_the_matrix_reads_pairs_and_closing_lines() -> None:
    assert matrix.pairs("2.11.0:3.6.0 newest") == [("2.11.0", "3.6.0"), ("", "")]
    assert matrix.counts("...\n2 failed, 30 passed, 1 error in 3.2s\n") == {"failed": 2, "passed": 30, "error": 1}
    assert matrix.failures({"a": {"failed": 2}, "b": {"error": 1, "passed": 3}}) == 3
    assert {"contract", "runtime", "training"} <= set(matrix.PIECES)
    assert matrix.installed(Path(sys.executable))[0] == importlib.metadata.version("torch").partition("+")[0]


# ------------------------------------------------------------------ what is built
def test_what_a_wheel_must_not_hold_or_lack_is_found() -> None:
    whole = [f"{p}/__init__.py" for p in [*dist.packages(), dist.DEMO]] + ["fusegrad/py.typed", "fusegrad/__main__.py"]
    whole += ["fusegrad-0.1.0.dist-info/METADATA"]
    assert dist.wheel_faults(whole) == []
    assert dist.wheel_faults([*whole, "fusegrad/tests/test_laws.py"]) == ["fusegrad/tests/test_laws.py is there"]
    assert dist.wheel_faults([n for n in whole if n != "fusegrad/py.typed"]) == ["no fusegrad/py.typed"]
    for folder in ("fusegrad/ir", dist.DEMO):
        assert dist.wheel_faults([n for n in whole if n != f"{folder}/__init__.py"]) == [f"no {folder}"]


def test_what_a_source_distribution_must_not_hold_or_lack_is_found() -> None:
    whole = [f"fusegrad-0.1.0/{name}" for name in dist.SOURCES]
    assert dist.sdist_faults(whole) == []
    assert dist.sdist_faults([*whole, "fusegrad-0.1.0/build/x.py"]) == ["build/x.py is there"]
    assert dist.sdist_faults(whole[1:]) == ["no pyproject.toml"]
    assert all((ROOT / name).exists() for name in dist.SOURCES)


def test_extras_are_on_their_page() -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `fusegrad\[(\w+)\]` \|", page, re.M)) == set(PROJECT["optional-dependencies"])


# ------------------------------------------------------------------ types, templates
def test_what_the_type_checkers_read_is_true() -> None:
    """The example runs, but for its last line, which they have to refuse; `make types` has them read it."""
    source = (ROOT / "tests" / "release" / "typed_functions.py").read_text(encoding="utf-8")
    assert source.rstrip().splitlines()[-1].startswith('swish("no tensor")  # type: ignore[arg-type]')
    with pytest.raises(TypeError, match="multiply"):
        runpy.run_path(str(ROOT / "tests" / "release" / "typed_functions.py"))
    assert "tests/release/typed_functions.py" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda p: p.stem)
def test_templates_ask_for_commands_that_exist(path: Path) -> None:
    asked = set(re.findall(r"`fusegrad (\w+)", path.read_text(encoding="utf-8")))
    assert {"doctor"} < asked <= set(COMMANDS)
