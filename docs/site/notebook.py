"""The tutorial as a notebook: `python docs/site/notebook.py` writes docs/tutorial.ipynb, which a test runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
PAGE, NOTEBOOK = DOCS / "tutorial.md", DOCS / "tutorial.ipynb"
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def notebook(page: str) -> dict[str, Any]:
    """Text as Markdown cells, Python blocks as code cells; what a block prints is left to the notebook."""
    cells, at = [], 0
    for fence in FENCE.finditer(page):
        cells.append(_cell("markdown", page[at : fence.start()]))
        if fence[1] == "python":
            cells.append(_cell("code", fence[3]))
        at = fence.end()
    cells.append(_cell("markdown", page[at:]))
    kept = [{**cell, "id": f"cell-{number}"} for number, cell in enumerate(c for c in cells if c["source"])]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": kept, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _cell(kind: str, text: str) -> dict[str, Any]:
    source = text.strip().replace(" The same page is a [notebook](tutorial.ipynb).", "").splitlines(keepends=True)
    cell = {"cell_type": kind, "metadata": {}, "source": source}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def text_of(page: str) -> str:
    """The file's text."""
    return json.dumps(notebook(page), indent=1) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(text_of(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
