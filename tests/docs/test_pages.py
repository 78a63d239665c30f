"""The documentation without its builder: links and anchors hold; every Python block runs and prints what it says."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
import sys
import types
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fusegrad
from fusegrad.__main__ import COMMANDS
from fusegrad.ir.codes import CODES
from fusegrad.runtime.export.export import FORMATS, TREES
from fusegrad.runtime.settings import config

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))
import make_site  # noqa: E402
import pictures  # noqa: E402
import reference  # noqa: E402

NAVIGATION = re.findall(r"^ +- ([^:]+): (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
WRITTEN = {"README.md": ROOT / "README.md", **{p.name: p for p in sorted((ROOT / "docs").glob("*.md"))}}
NOT_RUN = ("needs a GPU", "not run", "in a file", "model.py")
"""Titles of Python blocks that are compiled to byte code and not run; a reader sees them."""


@functools.cache
def pages() -> dict[str, str]:
    return make_site.pages()


# ------------------------------------------------------------------ links
def fences_out(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor of a heading, as Python-Markdown makes it."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading).replace("\\", "")
    ascii_only = unicodedata.normalize("NFKD", shown).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


def anchors(text: str) -> set[str]:
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", fences_out(text), re.MULTILINE):
        found[slug(heading)] = found.get(slug(heading), 0) + 1
    headings = {name if i == 0 else f"{name}_{i}" for name, count in found.items() for i in range(count)}
    return headings | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))  # of mkdocstrings


def links(text: str) -> list[str]:
    bare = re.sub(r"`[^`\n]*`", "", fences_out(text))
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", bare) if not target.startswith(("http:", "https:"))]


def test_every_page_of_the_navigation_exists() -> None:
    assert len(NAVIGATION) > 15
    assert {page for _, page in NAVIGATION} <= set(pages())


@pytest.mark.parametrize("name", [page for _, page in NAVIGATION])
def test_links_and_anchors_of_the_site(name: str) -> None:
    files = drawn_files() | set(make_site.COPIED)
    for target in links(pages()[name]):
        path, _, anchor = target.partition("#")
        assert not path or path in pages() or path in files, f"{name}: {target}"
        if anchor:
            assert anchor in anchors(pages()[path or name]), f"{name}: {target}"


def drawn_files() -> set[str]:
    """The files that docs/site/pictures.py writes."""
    kinds = (("pictures", "svg"), ("samples", "html"), ("samples", "py"))
    drawn = {f"{home}/{n}.{kind}" for n in pictures.ARGUMENTS for home, kind in kinds}
    return {"pictures/pipeline.svg", "pictures/call.svg", *drawn}


@pytest.mark.parametrize("path", [*WRITTEN.values(), ROOT / "examples" / "README.md"], ids=lambda path: path.name)
def test_links_within_the_repository(path: Path) -> None:
    made = set(reference.PAGES) | drawn_files()
    for target in links(path.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists() or (path.parent.name == "docs" and file in made), target
        if anchor and there.suffix == ".md" and there.exists():
            assert anchor in anchors(there.read_text(encoding="utf-8")), target


# ------------------------------------------------------------------ what is generated
def test_everything_public_is_on_its_page() -> None:
    assert set(anchors(pages()["commands.md"])) >= set(COMMANDS)
    assert all(f"`{f.name}`" in pages()["settings.md"] for f in dataclasses.fields(config.Settings))
    assert all(f"### {code.code}\n" in pages()["codes.md"] for code in CODES)


def test_every_environment_variable_has_a_row() -> None:
    assert reference.variables_read() <= set(reference.VARIABLES)


def test_every_error_class_has_a_code_and_a_message() -> None:
    for error in reference.error_classes():
        assert f"`{error.__name__}`" in pages()["codes.md"], error
        if error.speaks == "to the user":
            assert {"at:", "fix:"} <= set(reference.example_message(error).split()), error


def test_every_format_of_export_is_described() -> None:
    told = re.findall(r"^\| (`.*?`) \|", pages()["export.md"], re.MULTILINE)
    described = set(re.findall(r"`\.?([\w-]+)`", " ".join(told)))
    assert described == {*FORMATS, *TREES}, "the table of docs/export.md has a row for each format"


def test_a_page_that_asks_for_something_from_elsewhere_is_found() -> None:
    assert make_site.requests('<script src="https://cdn.example/x.js"></script>')
    assert make_site.requests('<link rel=stylesheet href="//fonts.example">')
    assert not make_site.requests('<a href="https://pytorch.org">torch</a><img src="pictures/a.svg">')


def test_long_names_are_no_markdown() -> None:
    assert reference.prose("a_b `c_d` x[1]") == r"a\_b `c_d` x\[1\]"


# ------------------------------------------------------------------ code
class Block(NamedTuple):
    line: int
    code: str
    title: str
    prints: str | None


def blocks(text: str) -> Iterator[Block]:
    """The Python blocks of a page, each with the output that is said to follow it."""
    fence = r'^```python(?: title="([^"]*)")?\n(.*?)^```\n(?:\n```text title="prints"\n(.*?)^```\n)?'
    for found in re.finditer(fence, text, re.DOTALL | re.MULTILINE):
        line = text[: found.start(2)].count("\n") + 1
        yield Block(line, found[2], found[1] or "", found[3])


def pattern(expected: str) -> str:
    """`...` stands for anything; blanks at the end of a line do not count."""
    lines = [".*".join(map(re.escape, line.rstrip().split("..."))) for line in expected.strip().splitlines()]
    return "\n".join(lines)


@pytest.mark.parametrize("name", WRITTEN)
def test_python_blocks_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = types.ModuleType("__page__")
    monkeypatch.setitem(sys.modules, "__page__", page)  # torch.compile imports the module of what it compiles
    text, scope = WRITTEN[name].read_text(encoding="utf-8"), vars(page)
    found = list(blocks(text))
    assert len(found) == len(re.findall(r"^```python", text, re.MULTILINE)), "a fence that cannot be read"
    for block in found:
        assert block.title in ("", *NOT_RUN), block.title
        source = "\n" * (block.line - 1) + block.code  # so that an error names the line of the page
        compiled = compile(source, str(WRITTEN[name]), "exec")
        if not block.title:
            run(compiled, block, scope)


def run(compiled: Any, block: Block, scope: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("error", fusegrad.FallbackWarning)
        exec(compiled, scope)
    if block.prints is not None:
        shown = "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())
        assert re.fullmatch(pattern(block.prints), shown, re.DOTALL), f"line {block.line} prints\n{shown}"
    return printed.getvalue()


def test_the_front_page_shows_one_launch_in_each_direction() -> None:
    (block,) = blocks(WRITTEN["README.md"].read_text(encoding="utf-8"))
    shown = run(compile(block.code, "README.md", "exec"), block, {"__name__": "__page__"})
    assert "forward: 1 launch, " in shown and "backward: 1 launch, " in shown
