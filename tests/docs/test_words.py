"""One word per thing: README and the pages use the glossary of docs/how_it_works.md, and no synonyms of its words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("conformance.md", "numerics.md", "trust.md", "world.md")
"""Pages that long runs write: they change with the next run."""
PAGES = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in GENERATED)]
CODE = re.compile(r"^```.*?^```|(?<=\n\n)(?: {4}[^\n]*\n)+|`[^`\n]*`|\]\([^)\s]*\)", re.DOTALL | re.MULTILINE)
"""Code, outputs, and the targets of links: names there are the program's."""
BANNED = {
    "trace": r"\b(re)?captur(e|es|ed|ing)\b",
    "specialization": r"\bvariants? (of|that|was|were|up)\b|\bspecialisation",
    "fall back to eager": r"\b(run|runs|ran|running) as (it is |they are |you |the user )?(written|wrote)",
    "the eager class": r"\bclass as (you wrote|written|it was written)",
    "intermediates": r"\bvalues? in between\b",
    "saved tensors": r"\b[Bb]ytes saved for backward\b|\b[Kk]ept for backward\b",
    "minimum traffic": r"\b[Ll]east possible\b",
    "matmul": r"\b[Mm]atrix products?\b",
    "batch": r"\b(over|between|of|all) (the )?lanes\b",
    "the user": r"\b([Hh]e|[Hh]is|[Hh]im|[Hh]imself|[Nn]obody|[Ss]omebody|[Ww]hoever|[Aa]nybody)\b",
}
"""By the word that stands instead, patterns of what it replaces."""
ALLOWED = (
    "| capture |", "run as written |", "| values in between |", "| kept for backward |", "| the least possible |",
    "a matrix product, `dot`", "turns of loops and lanes",
)  # fmt: skip
"""Lines of the glossary itself, and the lanes of a program."""


def synonyms(text: str) -> list[str]:
    """The synonyms in a text, each with its line."""
    lines = [line for line in text.split("\n") if not any(a in line for a in ALLOWED)]
    prose = CODE.sub(" ", "\n".join(lines))
    return [f"{word!r}, not {m.group()!r}" for word, pattern in BANNED.items() for m in re.finditer(pattern, prose)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_uses_the_words_of_the_glossary(page: Path) -> None:
    assert synonyms(page.read_text(encoding="utf-8")) == []


def test_a_synonym_is_found() -> None:
    assert synonyms("The method runs as you wrote it.") == ["'fall back to eager', not 'runs as you wrote'"]
    assert synonyms("It is `captured`, and\n\n```python\ncapture()\n```") == []


def test_every_word_of_the_glossary_is_on_a_page() -> None:
    page = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    glossary = page[page.index("## One word per thing") : page.index("## Where things are")]
    words = set(re.findall(r"^\| ([a-z ]+) \|", glossary, re.MULTILINE)) - {"word"}
    assert {"trace", "guard", "matmul", "minimum traffic"} <= words
    pages = "\n".join(p.read_text(encoding="utf-8") for p in PAGES).replace(glossary, "")
    assert {w for w in words if not re.search(w.replace("fall", "falls?"), pages, re.IGNORECASE)} == set()
