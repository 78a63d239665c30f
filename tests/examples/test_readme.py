"""What the README promises: its commands and its files exist. Its example is run with the other pages'."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_make_targets_exist() -> None:
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    promised = set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= promised
    assert all(re.search(rf"^{target}:", rules, re.MULTILINE) for target in promised)


def test_named_files_exist() -> None:
    named = re.findall(r"`((?:examples|tests|ir|tracer|codegen|runtime)/[\w/.]*)`", README)
    assert all((ROOT / path).exists() for path in named)


def test_ci_calls_the_test_command() -> None:
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().endswith("make test")
