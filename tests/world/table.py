"""The table of the world: package, class and how its arguments are made, read from table.txt.

    [snntorch]
    snntorch.surrogate:ATan    normal(4, 5), 2.0
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).resolve().parent / "table.txt"
LINE = re.compile(r"(?P<module>[\w.]+):(?P<name>[\w.]+)(?:\s+(?P<arguments>.*))?")


@dataclass(frozen=True)
class Row:
    """A class of a package, with its arguments in the words of `constructors.py`."""

    package: str
    module: str
    cls: str
    arguments: str

    @property
    def name(self) -> str:
        return f"{self.module}:{self.cls}"

    def asked(self) -> dict[str, str]:
        """What a worker is told."""
        return {"package": self.package, "module": self.module, "class": self.cls, "arguments": self.arguments}


def rows(text: str | None = None) -> list[Row]:
    """Every row, in the order of the table."""
    return list(_rows(TABLE.read_text(encoding="utf-8") if text is None else text))


def _rows(text: str) -> Iterator[Row]:
    package = ""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            package = line.strip("[]")
            continue
        found = LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"line {number} of the table is no row: {line}")
        yield Row(package, found["module"], found["name"], found["arguments"] or "")
