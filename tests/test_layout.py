"""How the code is laid out and how it reads: names of modules, length of functions, docstrings."""

from __future__ import annotations

import ast
import statistics
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
MODULES = sorted(p for package in PACKAGES for p in ROOT.joinpath(*package.split(".")[1:]).glob("*.py"))
VAGUE = {"util", "utils", "helper", "helpers", "manager", "managers", "common", "misc", "tools", "base", "core"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


LENGTHS = sorted(length(function) for path in MODULES for function in functions(path))


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_modules_are_named_after_their_idea(path: Path) -> None:
    assert path.stem.lower() not in VAGUE


@pytest.mark.parametrize("path", [p for p in MODULES if p.read_text(encoding="utf-8").strip()], ids=name)
def test_modules_say_what_they_are(path: Path) -> None:
    assert ast.get_docstring(tree(path))


def test_the_median_function_is_short() -> None:
    assert statistics.median(LENGTHS) <= 10


def test_nine_functions_in_ten_are_under_thirty_lines() -> None:
    assert LENGTHS[int(len(LENGTHS) * 0.9)] < 30
