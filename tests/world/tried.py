"""The classes of `tried.txt` beside what is known of the table: which of them it reaches, and what became of those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

PLACE = Path(__file__).with_name("tried.txt")


class Tried(NamedTuple):
    """A class of a public repository."""

    repository: str
    path: str
    cls: str

    def is_called(self, module: str, cls: str) -> bool:
        """Whether a class of an installed module is this one: its file ends the path, its name the class's."""
        parts, own = module.split("."), self.path.removesuffix(".py").removesuffix("/__init__").split("/")
        return cls.split(".")[-1] == self.cls.split(".")[-1] and own[-len(parts) :] == parts


def tried(text: str | None = None) -> list[Tried]:
    lines = (PLACE.read_text(encoding="utf-8") if text is None else text).splitlines()
    return [Tried(*line.split("\t")) for line in lines if line and not line.startswith("#")]


def named(one: Tried, names: Iterable[str]) -> str | None:
    """The `module:class` among these that it is."""
    return next((name for name in names if one.is_called(*name.split(":"))), None)


def found_in(surveys: Mapping[str, Mapping[str, list[list[str]]]]) -> list[str]:
    """The classes that the installed packages have."""
    return [":".join(found[:2]) for survey in surveys.values() for found in survey.get("classes", [])]
