"""check, export and profile on every example of the repository; `test_commands.py` explains each."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fusegrad.__main__ import main

sys.path.insert(0, str(Path(__file__).parents[1]))
from example_arguments import EXAMPLES

EXAMPLES_FOLDER = Path(__file__).resolve().parents[3] / "examples"


def answered(capsys: Any, *given: str) -> Any:
    """The JSON of a command."""
    assert main([given[0], "--json", *given[1:]]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_checked_exported_and_profiled(capsys, example, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = [f"{EXAMPLES_FOLDER}/{example}", "--args", *EXAMPLES[example]]
    few = ["--transform", "backward", "--transform", "hessian", "--layout", "step 2", "--size", "3"]
    assert answered(capsys, "check", *given, *few)["ok"]
    ast.parse(answered(capsys, "export", *given)["text"])
    facts = answered(capsys, "profile", *given, "--seconds", "0", "-o", "p.html")
    assert facts["function"] == example.partition(":")[2] and Path("p.html").exists()
