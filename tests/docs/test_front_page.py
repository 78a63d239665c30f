"""README's tables, kernel and picture are of today: `python docs/site/front_page.py` renews them."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))
import front_page  # noqa: E402

HOW = "python docs/site/front_page.py"


def test_the_blocks_of_readme_are_of_today() -> None:
    readme = front_page.README.read_text(encoding="utf-8")
    assert front_page.renewed(readme) == readme, HOW


def test_the_picture_is_of_today() -> None:
    drawn = front_page.picture()
    assert front_page.PICTURE.read_text(encoding="utf-8") == drawn, HOW
    xml.fromstring(drawn)


def test_a_stale_block_is_renewed() -> None:
    readme = front_page.README.read_text(encoding="utf-8")
    stale = re.sub(r"(SwiGLU backward +)\d", r"\g<1>7", readme)
    assert stale != readme and front_page.renewed(stale) == readme


def test_the_numbers_of_conformance_are_there() -> None:
    counts = front_page.conformance()
    assert set(counts) == {"eager", "fusegrad", "torch.compile"}
    assert all(sum(map(int, numbers)) == 200 for numbers in counts.values())
