"""New rows for the table: each Function class of a package that it does not know, with arguments that eager takes.

    python tests/world/propose.py PACKAGE ... >> tests/world/table.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

from supervised import Child
from table import rows

HERE = Path(__file__).resolve().parent
SILENT = 180.0


def main(packages: list[str]) -> None:
    known = {(row.module, row.cls) for row in rows()}
    for package in packages:
        survey = Child([sys.executable, str(HERE / "published.py")], SILENT)
        found = survey.once({"package": package}).get("classes", [])
        survey.end()
        print(f"\n[{package}]", flush=True)
        child = Child([sys.executable, str(HERE / "proposals.py")], SILENT)
        for module, name in (pair for pair in found if tuple(pair) not in known):
            told = child.once({"module": module, "class": name})
            print(line(f"{module}:{name}", told), flush=True)
        child.end()


def line(name: str, told: dict[str, object]) -> str:
    """A row; a comment where nothing worked or no gradient comes."""
    if not told.get("worth"):
        return f"# {name}"
    return f"{'' if told['worth'] == 2 else '# no gradient: '}{name}    {told['arguments']}"


if __name__ == "__main__":
    main(sys.argv[1:])
