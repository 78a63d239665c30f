"""The tutorial as a notebook: it is what the page says, and its cells run one after the other."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))
import notebook  # noqa: E402


def test_the_notebook_is_the_page() -> None:
    page = notebook.PAGE.read_text(encoding="utf-8")
    assert notebook.NOTEBOOK.read_text(encoding="utf-8") == notebook.text_of(page), "python docs/site/notebook.py"


def test_its_cells_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads(notebook.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    scope = types.ModuleType("__page__")
    monkeypatch.setitem(sys.modules, "__page__", scope)
    for number, source in enumerate(code):
        exec(compile(source, f"cell {number}", "exec"), scope.__dict__)
    assert len(code) >= 8 and "FG010" in capsys.readouterr().out
