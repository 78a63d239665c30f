"""docs/api.md shows every public name and no internal; each parameter, field and member that it shows is described."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc import locate
from typing import Any

import pytest

import fusegrad

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))
from reference import attribute_docstrings  # noqa: E402

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
SHOWN: dict[str, Any] = {name: locate(name) for name in re.findall(r"^::: (\S+)$", PAGE, re.MULTILINE)}
CLASSES = [found for found in SHOWN.values() if isinstance(found, type)]
FUNCTIONS = [found for found in SHOWN.values() if not isinstance(found, type)]
MODULES = {"config": {"patch", "logs", "recycle_memory", "Settings"}, "random": {"uniform", "normal"}}
"""What is public of the public modules."""
HIDDEN = re.findall(r'"!\^(\w+)\$"', (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
"""The members that mkdocs.yml leaves out."""
SECTION = r"^Args:\n((?:(?: {4}.*)?\n)+)"


# ------------------------------------------------------------------ what is shown
def test_every_name_of_the_page_is_there() -> None:
    assert [name for name, found in SHOWN.items() if found is None] == [] and len(SHOWN) > 40


def test_every_public_name_is_on_the_page() -> None:
    of_modules = {f"{module}.{name}" for module, names in MODULES.items() for name in names - {"Settings"}}
    wanted = {f"fusegrad.{name}" for name in (set(fusegrad.__all__) - set(MODULES)) | of_modules}
    assert wanted - set(SHOWN) == set()


def internals(shown: dict[str, Any]) -> list[str]:
    """The names that are neither public nor, by an annotation, part of what a public one takes or returns."""
    public = {f"fusegrad.{name}" for name in fusegrad.__all__}
    public |= {f"fusegrad.{module}.{name}" for module, names in MODULES.items() for name in names}
    annotations = " ".join(annotation for found in shown.values() for annotation in annotations_of(found))
    returned = {name for name, found in shown.items() if isinstance(found, type) and re.search(
        rf"\b{found.__name__}\b", annotations)}  # fmt: skip
    return [name for name in shown if name not in public | returned]


def annotations_of(found: Any) -> Iterator[str]:
    if isinstance(found, type):
        yield from map(str, vars(found).get("__annotations__", {}).values())
        for _, member in members(found):
            yield from annotations_of(member)
    elif callable(found):
        yield from map(str, getattr(inspect.unwrap(found), "__annotations__", {}).values())


def test_no_internal_is_shown() -> None:
    assert internals(SHOWN) == []
    planted = "fusegrad.config.with_numerics"
    assert internals({**SHOWN, planted: locate(planted)}) == [planted]


# ------------------------------------------------------------------ how it is described
def members(found: type) -> list[tuple[str, Any]]:
    """The own methods and properties that the page shows."""
    plain = ((n, inspect.unwrap(getattr(m, "fget", None) or getattr(m, "__func__", m))) for n, m in vars(found).items())
    return [(n, m) for n, m in plain if inspect.isfunction(m) and not n.startswith("_") and n not in HIDDEN]


def undescribed(found: Any) -> list[str]:
    """The parameters of a function, or the fields and members of a class, that have no description."""
    if not isinstance(found, type):
        return undescribed_parameters(found)
    fields = [n for n in vars(found).get("__annotations__", {}) if not n.startswith("_") and n not in HIDDEN]
    texts = attribute_docstrings(found)
    missing = [n for n in fields if not texts.get(n, "").strip()]
    missing += [] if found.__doc__ and not found.__doc__.startswith(f"{found.__name__}(") else ["the class"]
    return missing + [f"{n}: {m}" for n, member in members(found) for m in undescribed_parameters(member)]


def undescribed_parameters(function: Any) -> list[str]:
    text = inspect.getdoc(function)
    if not text:
        return ["the function"]
    section = re.search(SECTION, f"{text}\n", re.MULTILINE)
    described = set(re.findall(r"^ {4}(\w+): \S", section[1], re.MULTILINE)) if section else set()
    return sorted((set(inspect.signature(function).parameters) - {"self"}) ^ described)


@pytest.mark.parametrize("name", SHOWN)
def test_everything_shown_is_described(name: str) -> None:
    assert undescribed(SHOWN[name]) == []


def test_what_has_no_description_is_found() -> None:
    def half(a: int, b: int) -> None:
        """Half a description.

        Args:
            a: The first.
            c: One that is not there.
        """

    @dataclass
    class Half:
        """A class."""

        first: int
        """The first."""
        second: int

        def method(self) -> None: ...

    assert undescribed(half) == ["b", "c"]
    assert undescribed(Half) == ["second", "method: the function"]
