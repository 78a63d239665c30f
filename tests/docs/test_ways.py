"""The ways of a call: the tables of the dispatcher and of docs/how_it_works.md name the same ones."""

from __future__ import annotations

import re
from pathlib import Path

from fusegrad.runtime.dispatch.call import Mode, Outcome
from fusegrad.runtime.dispatch.dispatcher import PLAIN_ROUTES, ROUTES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
ONE_CALL = PAGE[PAGE.index("## One call through the rooms") : PAGE.index("From the roof to the ground:")]


def rows(page: str) -> set[str]:
    """The first cells of its tables."""
    return set(re.findall(r"^\| (.+?) \|", page, re.MULTILINE))


def test_every_way_has_a_route_and_a_row() -> None:
    assert list(ROUTES) == list(Mode) and list(PLAIN_ROUTES) == list(Outcome)
    assert rows(ONE_CALL) == {"a call", "the table has", *(m.value for m in Mode), *(o.value for o in Outcome)}


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`([a-z_]+/[\w/]+\.py)`", ONE_CALL))
    missing = {n for n in named if not ((ROOT / n).exists() or (ROOT / "runtime" / n).exists())}
    assert named and not missing
