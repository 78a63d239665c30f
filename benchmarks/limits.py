"""The committed table of launches, bytes and saved bytes per case, which no change may exceed: `limits.json`.

    python -m fusegrad.benchmarks limits             lowers what has become better; nothing is ever raised
    python -m fusegrad.benchmarks limits --raise     writes the table as it is now
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("limits.json")
Limits = dict[str, dict[str, list[int]]]


def facts(plan: Mapping[str, Any]) -> dict[str, list[int]]:
    """What is limited of a plan: forward's number, then backward's."""
    return {"launches": plan["launches"], "bytes": plan["bytes"], "saved": [plan["saved"]]}


def read(path: Path = PATH) -> Limits:
    """The committed table."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def excesses(plan: Mapping[str, Any], limits: Limits) -> list[str]:
    """What is above the table; a case that it does not have is above it, too."""
    limit = limits.get(plan["case"])
    if limit is None:
        return [f"{plan['case']} is not in {PATH.name}"]
    found = facts(plan)
    above = [name for name in found if _above(found[name], limit[name])]
    return [f"{plan['case']}: {name} {found[name]}, the limit is {limit[name]}" for name in above]


def _above(found: Iterable[int], limit: Iterable[int]) -> bool:
    return any(f > at_most for f, at_most in zip(found, limit, strict=True))


def tightened(limits: Limits, plans: Iterable[Mapping[str, Any]], may_rise: bool) -> Limits:
    """The table after these plans: each number the smaller one, unless it may rise."""
    result = {name: dict(limit) for name, limit in limits.items()}
    for plan in plans:
        new, old = facts(plan), result.get(plan["case"])
        keep = may_rise or old is None
        result[plan["case"]] = new if keep else {n: list(map(min, new[n], old[n])) for n in new}  # type: ignore[index]
    return result


def write(limits: Limits, path: Path = PATH) -> None:
    """One case a line, so that a change reads well."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(limit)}" for name, limit in sorted(limits.items()))
    path.write_text(f"{{\n{lines}\n}}\n")
