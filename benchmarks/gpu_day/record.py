"""What is known of one device with one set of versions, in a file that is whole at every moment."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .steps import Step

FINAL = ("ok", "skipped")
"""Outcomes that stand; others are tried again with another commit, or when asked for."""
TWICE = 2
"""Slices that may end within a unit before it counts as one that does not end."""


class Record:
    """The file's content. `put` writes it at once."""

    def __init__(self, path: Path, surroundings: Mapping[str, Any], known: Mapping[str, Any] | None = None) -> None:
        empty: dict[str, Any] = {"slices": [], "interrupted": {}, "steps": {}}
        self.path = path
        self.data: dict[str, Any] = {**empty, **(known or {}), "surroundings": dict(surroundings)}

    # -------------------------------------------------------------- reading
    def units(self, step: str) -> dict[str, Any]:
        """{unit: what became of it}"""
        return self.data["steps"].get(step, {})  # type: ignore[no-any-return]

    def results(self, *steps: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(step, unit, what became of it) of these steps, or of all."""
        for step in steps or self.data["steps"]:
            yield from ((step, unit, found) for unit, found in self.units(step).items())

    def seconds(self, step: str) -> float:
        """That the step's units took, in all slices."""
        return float(sum(found["seconds"] for found in self.units(step).values()))

    def left(self, step: Step, again: bool = False) -> list[str]:
        """The step's units that have no result, or none that stands."""
        return [unit for unit in step.units() if not self._stands(self.units(step.name).get(unit), again)]

    def _stands(self, found: Mapping[str, Any] | None, again: bool) -> bool:
        if found is None:
            return False
        if again and found["slice"] != len(self.data["slices"]):  # once in a slice
            return found["outcome"] == "ok"
        return found["outcome"] in FINAL or found["commit"] == self.commit

    @property
    def commit(self) -> str:
        return str(self.data["surroundings"]["commit"])

    # -------------------------------------------------------------- writing
    def begin(self, minutes: float, date: str) -> None:
        self.data["slices"].append({"minutes": minutes, "date": date, "commit": self.commit, "seconds": 0})
        self.write()

    def put(self, step: str, unit: str, found: Mapping[str, Any]) -> None:
        now = {"commit": self.commit, "slice": len(self.data["slices"])}
        self.data["steps"].setdefault(step, {})[unit] = {**found, **now}
        self.data["interrupted"].pop(f"{step} {unit}", None)
        self.write()

    def interrupt(self, step: str, unit: str, found: Mapping[str, Any]) -> None:
        """The slice ended within a unit: the next one tries it once more."""
        times = self.data["interrupted"].get(f"{step} {unit}", 0) + 1
        if times >= TWICE:
            self.put(step, unit, found)
        else:
            self.data["interrupted"][f"{step} {unit}"] = times
            self.write()

    def spend(self, seconds: float) -> None:
        """How long this slice has taken so far."""
        self.data["slices"][-1]["seconds"] = round(seconds)

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(beside, self.path)


# ------------------------------------------------------------------ which file
def slug(*words: str) -> str:
    """ "NVIDIA H100 80GB HBM3" -> "nvidia-h100-80gb-hbm3" """
    return re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-")


def is_of(data: Mapping[str, Any], surroundings: Mapping[str, Any]) -> bool:
    """Whether results were got on such a device with such versions."""
    known = data.get("surroundings", {})
    return all(known.get(key) == surroundings[key] for key in ("device", "versions"))


def open_record(folders: Sequence[Path], surroundings: Mapping[str, Any], afresh: bool = False) -> Record:
    """The record of a device: in the first folder, continued from whichever has one for the same versions.

    Other versions on the same device have a file of their own, which says them in its name.
    """
    name = f"gpu-{slug(surroundings['device'])}"
    versions = surroundings["versions"]
    more = slug(*(f"{package} {versions[package]}" for package in sorted(versions)))
    for stem in (name, f"{name}-{more}"):
        known = [json.loads((f / f"{stem}.json").read_text()) for f in folders if (f / f"{stem}.json").exists()]
        if not known:
            return Record(folders[0] / f"{stem}.json", surroundings)
        if is_of(known[0], surroundings):
            return Record(folders[0] / f"{stem}.json", surroundings, {} if afresh else known[0])
    return Record(folders[0] / f"{name}-{more}.json", surroundings)
