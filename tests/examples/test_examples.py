"""Every script under examples/ runs and agrees with eager."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if path.name != "compare.py")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_example_agrees_with_eager(script: Path) -> None:
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "reference" in done.stdout and "interpret" in done.stdout


def test_readme_lists_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{script.name}`" in text for script in SCRIPTS)
