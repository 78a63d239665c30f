"""The committed table of spills and access widths on sm_90, which no change may worsen: `needs.json`.

    make bench ARGS="--only kernels"                     measures them
    python -m fusegrad.benchmarks needs --write-docs     writes the table from what was measured
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .plans import DIRECTIONS, TARGET

PATH = Path(__file__).with_name("needs.json")
Needs = dict[str, list[dict[str, int] | None]]


def facts(row: Mapping[str, Any]) -> list[dict[str, int] | None]:
    """Per direction spilled bytes, and the bytes of the narrowest load and store of what is streamed."""
    return [_facts(needs) for needs in row["targets"][TARGET]]


def _facts(needs: Mapping[str, Any] | None) -> dict[str, int] | None:
    if needs is None:
        return None
    narrowest = {kind: min(map(int, widths)) for kind in ("load", "store") if (widths := needs["streams"][kind])}
    return {"spills": needs["spills"], **narrowest}


def read(path: Path = PATH) -> Needs:
    """The committed table."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write(rows: Iterable[Mapping[str, Any]], path: Path = PATH) -> None:
    """One case a line."""
    lines = ",\n".join(f"{json.dumps(row['case'])}: {json.dumps(facts(row))}" for row in rows)
    path.write_text(f"{{\n{lines}\n}}\n")


def excesses(row: Mapping[str, Any], table: Needs) -> list[str]:
    """What is worse than the table: more spilled, narrower accesses."""
    found = zip(DIRECTIONS, facts(row), table.get(row["case"], [None, None]), strict=True)
    return [f"{row['case']} {d}: {worse}" for d, now, then in found if now and then for worse in _worse(now, then)]


def _worse(now: Mapping[str, int], then: Mapping[str, int]) -> Iterable[str]:
    if now["spills"] > then["spills"]:
        yield f"{now['spills']} spilled bytes, the limit is {then['spills']}"
    for kind in ("load", "store"):
        if now.get(kind, 16) < then.get(kind, 0):
            yield f"{kind}s of {now[kind]} bytes, they were {then[kind]} wide"
