"""Runs tests with one module of the package replaced by the text on stdin: `python mutant_trial.py PATH TESTS...`."""

from __future__ import annotations

import importlib.machinery
import resource
import sys
import types
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 400
"""Of processor time, which other work on the machine does not shorten: no stage takes as much when nothing hangs."""
QUIET = ("-q", "-x", "-p", "no:cacheprovider", "-W", "ignore", "--no-header", "--tb=no")


def replace(path: Path, text: str) -> None:
    """From now on the module at this path is made of this text."""
    found = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> types.CodeType | None:
        if Path(self.path).resolve() == path:
            return compile(text, str(path), "exec")
        return found(self, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def always_the_same_examples() -> None:
    """Without the failing examples of other mutants, and without luck."""
    settings.register_profile("mutant", derandomize=True, database=None)
    settings.load_profile("mutant")


if __name__ == "__main__":
    always_the_same_examples()
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    replace(ROOT / sys.argv[1], sys.stdin.read())
    sys.exit(pytest.main([*QUIET, *sys.argv[2:]]))
