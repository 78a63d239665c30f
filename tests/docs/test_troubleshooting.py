"""The mistakes of docs/troubleshooting.md: what eager and fusegrad say of each is of today, and ours is not longer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import fusegrad

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))
import mistakes  # noqa: E402

PAGE = mistakes.PAGE.read_text(encoding="utf-8")
MISTAKES = mistakes.mistakes()
OURS = 5
"""The lines that an error of ours has besides eager's: `at`, `fix`, and what a warning adds."""


def test_the_page_has_every_mistake() -> None:
    assert len(MISTAKES) == 24 and all(f"### {m.title}\n" in PAGE for m in MISTAKES)


@pytest.mark.skipif(f"torch {torch.__version__.partition('+')[0]}." not in PAGE, reason="the page quotes another torch")
def test_the_page_is_of_today() -> None:
    assert mistakes.renewed(PAGE) == PAGE, "python docs/site/mistakes.py"


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.title)
def test_a_mistake_is_told_as_shortly_as_by_eager(mistake: mistakes.Mistake) -> None:
    eager, ours = mistakes.run(mistake, mistakes.EAGER), mistakes.run(mistake, fusegrad)
    assert ours.lines <= (eager.lines + OURS if eager.text else 13)
    if ": " in eager.text and "fix:" not in ours.text and "torch.compile" not in mistake.title:
        kind, _, words = eager.text.partition(": ")
        assert kind in ours.text and words in ours.text


def test_a_program_that_says_something_else_is_found() -> None:
    (typo,) = (m for m in MISTAKES if m.title == "A typo")
    block = "".join(mistakes.block(mistakes.run(typo, fusegrad)))
    other = mistakes.Mistake(typo.title, typo.before, typo.code.replace("sigmoidd", "tanhh"))
    assert block in PAGE and "".join(mistakes.block(mistakes.run(other, fusegrad))) not in PAGE
