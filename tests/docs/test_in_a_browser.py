"""Pages of the site in a browser 500 px wide: what is wider scrolls within itself, and the page stays where it is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
BUILDER = find_spec("mkdocs") and find_spec("mkdocstrings")
PAGES = ("index", "tutorial", "api", "gallery", "troubleshooting", "benchmarks", "codes", "settings")
WIDTH = 500
PROBE = """<script>addEventListener("load", () => {
const scrolls = e => /auto|scroll|hidden/.test(getComputedStyle(e).overflowX);
const held = e => e.tagName == "ARTICLE" ? false : scrolls(e) || held(e.parentElement);
const wide = [...document.querySelectorAll("article *")].filter(
    e => e.getBoundingClientRect().right > innerWidth + 1 && !held(e.parentElement));
const shown = [document.documentElement.scrollWidth, ...wide.map(e => e.outerHTML.slice(0, 60))];
document.body.dataset.probe = shown.join("|");
})</script></body>"""
"""The page's own width, and what of it reaches beyond the window and is held by nothing that scrolls."""

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason=f"no browser on PATH (one of {', '.join(BROWSERS)})"),
    pytest.mark.skipif(not BUILDER, reason="mkdocs is not installed: pip install -e '.[docs]'"),
    pytest.mark.xdist_group("site"),
]


@pytest.fixture(scope="module")
def site() -> Path:
    command = [sys.executable, str(ROOT / "docs" / "site" / "make_site.py")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    return ROOT / "build" / "site"


def probed(page: Path, folder: Path) -> tuple[int, list[str]]:
    """The width of a page, and what reaches out of it."""
    copy = page.with_name(f"probe-{page.name}")  # beside its styles
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        f"--user-data-dir={folder / 'user'}", f"--window-size={WIDTH},900", "--virtual-time-budget=3000", "--dump-dom",
        copy.as_uri(),
    ]  # fmt: skip
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    finally:
        copy.unlink()
    found = re.search(r'data-probe="([^"]*)"', shown)
    assert found is not None, "the probe did not run"
    width, *wide = found[1].split("|")
    return int(width), wide


@pytest.mark.parametrize("name", PAGES)
def test_a_narrow_page_does_not_scroll_sideways(name: str, site: Path, tmp_path: Path) -> None:
    width, wide = probed(site / f"{name}.html", tmp_path)
    assert width <= WIDTH and wide == []


def test_what_is_too_wide_is_found(site: Path, tmp_path: Path) -> None:
    page = site / "wide.html"
    text = (site / "index.html").read_text(encoding="utf-8")
    page.write_text(re.sub(r"(<article[^>]*>)", r'\1<p style="width: 900px">wide</p>', text), encoding="utf-8")
    try:
        assert probed(page, tmp_path)[1]
    finally:
        page.unlink()
