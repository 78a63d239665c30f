"""`make world`: classes of published packages beside themselves compiled, and their own tests beside a plain run.

    python tests/world/world.py [classes] [suites] [page] [--only PACKAGE ..] [--backends reference,interpret]

Runs in the environment that holds the packages (tests/world/requirements.txt). What was measured is in
benchmarks/results/world.json after every row; a second run goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import suites
import world_page
from packages import UNAVAILABLE
from supervised import Child
from surroundings import ROOT, placeless, surroundings
from table import Row, rows

HERE = Path(__file__).resolve().parent
RESULTS = ROOT / "benchmarks" / "results" / "world.json"
SILENT = 300.0
"""Seconds without a word after which a worker is taken to hang."""
Told = dict[str, Any]


class Results:
    """What is known so far, written down after every row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told: Told = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for part in ("surveys", "classes", "suites"):
            self.told.setdefault(part, {})

    def put(self, part: str, name: str, fact: Any) -> None:
        self.told[part][name] = placeless(fact)
        self.told["runs"] = surroundings()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".fresh")
        fresh.write_text(json.dumps(self.told, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        fresh.replace(self.path)


def surveyed(results: Results, packages: list[str], again: bool) -> None:
    """Which classes the packages have, and what cannot be imported."""
    for package in packages:
        if package in results.told["surveys"] and not again:
            continue
        child = Child([sys.executable, str(HERE / "published.py")], SILENT)
        results.put("surveys", package, child.once({"package": package}))
        child.end()


def driven(results: Results, chosen: list[Row], backends: list[str], again: bool) -> None:
    """Each row of the table on each backend that it was not on yet."""
    children: dict[str, Child] = {}
    for row in chosen:
        fact = results.told["classes"].get(row.name, {})
        fact = {} if again or fact.get("arguments") != row.arguments else fact
        missing = [b for b in backends if b not in fact.get("backends", {})]
        if not missing or "absent" in fact:
            continue
        for other in [p for p in children if p != row.package]:
            children.pop(other).end()
        child = children.setdefault(row.package, Child([sys.executable, str(HERE / "worker.py")], SILENT))
        results.put("classes", row.name, merged(fact, row, child, missing))
        print(line(row.name, results.told["classes"][row.name]), flush=True)
    for child in children.values():
        child.end()


def merged(fact: Told, row: Row, child: Child, backends: list[str]) -> Told:
    """The answers of a worker about a row, beside what is known of other backends."""
    made: Told = {**fact, "package": row.package, "arguments": row.arguments}
    found = made.setdefault("backends", {})
    for answer in child.ask({**row.asked(), "backends": backends}):
        if "scene" in answer:
            words = found.setdefault(answer["backend"], {"scenes": {}})["scenes"]
            words[answer["scene"]] = [answer["word"], answer["detail"]]
        elif "backend" in answer:
            found[answer["backend"]].update({k: v for k, v in answer.items() if k != "backend"})
        elif "lost" in answer:
            at = next((b for b in reversed(backends) if b in found), backends[0])
            found.setdefault(at, {"scenes": {}})["lost"] = answer["lost"]
        elif "absent" in answer:
            made["absent"] = answer["absent"]
    return made


def line(name: str, fact: Told) -> str:
    """A row in a line: its worst word on each backend."""
    if "absent" in fact:
        return f"{name}: {fact['absent']}"
    worst = (f"{backend} {', '.join(world_page.words(told)) or 'right'}" for backend, told in fact["backends"].items())
    return f"{name}: {'; '.join(worst)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["classes", "suites", "page"], help="classes, suites, page")
    parser.add_argument("--only", nargs="*", default=[], help="packages")
    parser.add_argument("--backends", default="reference,interpret")
    parser.add_argument("--again", action="store_true", help="what is known already as well")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    results = Results(asked.out)
    chosen = [row for row in rows() if not asked.only or row.package in asked.only]
    if "classes" in asked.parts:
        surveyed(results, list(dict.fromkeys(row.package for row in chosen)), asked.again)
        driven(results, chosen, asked.backends.split(","), asked.again)
    if "suites" in asked.parts:
        suites.run(results, asked.only, asked.again)
    if "page" in asked.parts:
        world_page.write(results.told, UNAVAILABLE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
