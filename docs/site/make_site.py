"""`make docs`: the pages of docs/, those read out of the package and the pictures, made into a site by mkdocs.

The site is in build/site and needs no network to be read: no scripts, styles, fonts or pictures from elsewhere. A link
to a page or an anchor that does not exist fails the build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pictures
import reference

ROOT = Path(__file__).resolve().parents[2]
DOCS, STAGE, SITE = ROOT / "docs", ROOT / "build" / "site-pages", ROOT / "build" / "site"
SOURCES = ROOT / "build" / "site-sources"
"""Copies of the package, of which mkdocstrings reads the signatures and docstrings of api.md."""
PACKAGE = ("__init__.py", "ir", "tracer", "codegen", "runtime")
OUTSIDE = {
    "../benchmarks/results/cpu.svg": "pictures/cpu.svg",
    "../examples/README.md": "examples.md",
    "../README.md": "index.md",
}
"""Links out of docs/, as the site has them."""
COPIED = {"pictures/cpu.svg": ROOT / "benchmarks" / "results" / "cpu.svg",
          "pictures/overview.svg": DOCS / "pictures" / "overview.svg", "site.css": DOCS / "site" / "site.css",
          "worker.js": DOCS / "site" / "worker.js", "tutorial.ipynb": DOCS / "tutorial.ipynb"}  # fmt: skip
SHIM = "https://unpkg.com/iframe-worker/shim"
"""What the theme loads for its search in pages opened from disk; `worker.js` takes its place."""


def written_pages() -> dict[str, str]:
    """The pages of docs/, with the links out of it turned to where the site has their targets."""
    return {path.name: inward(path.read_text(encoding="utf-8")) for path in sorted(DOCS.glob("*.md"))}


def inward(text: str) -> str:
    return re.sub(r"\]\((\.\./[^)#]+)", lambda found: f"]({OUTSIDE.get(found[1], found[1])}", text)


def pages() -> dict[str, str]:
    """Every page of the site by its name."""
    return {**written_pages(), **{name: made() for name, made in reference.PAGES.items()}}


def stage() -> None:
    """Everything that mkdocs reads, in build/site-pages."""
    shutil.rmtree(STAGE, ignore_errors=True)
    STAGE.mkdir(parents=True)
    for name, text in [*pages().items(), *pictures.files()]:
        target = STAGE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    for name, source in COPIED.items():
        shutil.copy(source, STAGE / name)
    shutil.rmtree(SOURCES, ignore_errors=True)
    for path in (p for name in PACKAGE for p in sorted([ROOT / name, *(ROOT / name).rglob("*.py")])):
        if path.is_file():
            target = SOURCES / "fusegrad" / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def requests(page: str) -> list[str]:
    """What a browser would fetch from elsewhere to show a page."""
    loads = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\s\"'>]+", page)
    return loads + re.findall(r"<link\b(?![^>]*canonical)[^>]*\bhref=[\"']?(?:https?:)?//[^\s\"'>]+", page)


def offline(path: Path) -> str:
    """The text of a page, with nothing in it that is loaded from elsewhere for the search."""
    text = path.read_text(encoding="utf-8").replace(SHIM, "worker.js")
    path.write_text(text, encoding="utf-8")
    return text


def main() -> int:
    stage()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    if done.returncode:
        return done.returncode
    found = {path: requests(offline(path)) for path in SITE.rglob("*.html")}
    for path, loads in found.items():
        for load in loads:
            print(f"{path}: {load}", file=sys.stderr)
    print(f"{len(found)} pages in {SITE}; open {SITE / 'index.html'}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
