"""The script of the first hour: it reads every block of the tutorial, and tells what a step took."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import newcomer
import pytest

PAGE = """# T

## The class

```python
import torch


x = 1
```

```text
2
```

## Words

none

## Use

```python
import tempfile
y = x + 1
folder = tempfile.gettempdir()
```
"""


def test_sections_and_their_blocks() -> None:
    found = newcomer.sections(PAGE)
    assert [(title, len(blocks)) for title, blocks in found] == [("The class", 1), ("Use", 1)]
    apart = newcomer.with_import_apart(found)
    assert [title for title, _ in apart] == ["import", "The class", "Use"] and apart[0][1][0].startswith("import torch")


def test_the_tutorial_has_every_step() -> None:
    page = (newcomer.ROOT / newcomer.TUTORIAL).read_text(encoding="utf-8")
    found = dict(newcomer.sections(page))
    assert {"Compiling it", "Checking it", "Timing it", "A file to ship"} <= found.keys()
    assert sum(map(len, found.values())) == page.count("\n```python\n")
    assert newcomer.FILE in "".join(found["A file to ship"])


def test_a_session_is_timed_by_section(tmp_path: Path) -> None:
    parts = json.dumps(newcomer.with_import_apart(newcomer.sections(PAGE)))
    command = [sys.executable, "-c", newcomer.SESSION, parts, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = json.loads(done.stdout)
    assert list(said["seconds"]) == ["import", "The class", "Use"] and said["file"]
    assert min(said["seconds"].values()) > 0


def test_a_step_that_fails_is_an_error() -> None:
    steps = newcomer.Steps()
    with pytest.raises(subprocess.CalledProcessError):
        steps.run("fails", [sys.executable, "-c", "raise SystemExit(3)"])
    assert steps.run("works", [sys.executable, "-c", "print(7)"]) == "7\n" and list(steps.seconds) == ["works"]


def test_the_table_adds_up() -> None:
    lines = list(newcomer.table({"clone": 1.0, "the tutorial, in all": 9.0, "import": 2.5}))
    assert [line.split()[2] for line in lines] == ["1.0", "1.0", "3.5"]
