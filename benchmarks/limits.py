"""The committed table of launches, bytes, saved bytes and warp instructions, which no change may exceed: `limits.json`.

python -m fusegrad.benchmarks limits --write-docs             lowers what has become better; nothing is ever raised
python -m fusegrad.benchmarks limits --write-docs --raise     writes the table as it is now
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import plans
from .instructions import model
from .suite import CASES, Case

PATH = Path(__file__).with_name("limits.json")
COMPILED = "limits_of_instructions.json"
"""Beside it: what the compiler decides, too, by its version."""
Facts = dict[str, list[float]]
Limits = dict[str, Facts]
COUNTED_SHAPES = ("512,1024", "4096,4096")
"""Whose kernels are compiled and counted; of Functions that are not measured at these, the first shape."""


def facts(plan: Mapping[str, Any]) -> Facts:
    """What is limited of a plan: forward's number, then backward's. Instructions are those of one version of Triton."""
    found: Facts = {"launches": plan["launches"], "bytes": plan["bytes"], "saved": [plan["saved"]]}
    return found | {name: plan[name] for name in plan if name.startswith(INSTRUCTIONS)}


INSTRUCTIONS = "instructions, triton "


def counted(cases: Sequence[Case]) -> list[Case]:
    """The cases whose instructions are limited."""
    first = {case.function: case for case in reversed(cases)}
    functions = {case.function for case in cases if case.shape in COUNTED_SHAPES}
    return [c for c in cases if c.shape in COUNTED_SHAPES or (first[c.function] is c and c.function not in functions)]


def plan_with_instructions(case: Case) -> dict[str, Any]:
    """A plan, and for the counted cases its warp instructions for 32 elements on an H100, in tenths, rounded up."""
    if case not in counted(CASES):
        return plans.plan(case)
    return plans.plan(case) | instructions_of(case)


def instructions_of(case: Case) -> dict[str, list[float]]:
    """{"instructions, triton 3.7.1": [forward, backward]}: compiled for sm_90, followed, not run."""
    found = model(case)
    return {
        INSTRUCTIONS + version("triton"): [
            math.ceil(10 * found[d]["per_32"] - 1e-6) / 10 if found[d] else 0.0 for d in plans.DIRECTIONS
        ]
    }


def read(path: Path = PATH) -> Limits:
    """The committed table, out of its two files."""
    of_plans, of_code = (_rows(file) for file in (path, path.with_name(COMPILED)))
    return {name: {**limit, **of_code.get(name, {})} for name, limit in of_plans.items()}


def _rows(path: Path) -> Limits:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def excesses(plan: Mapping[str, Any], limits: Limits) -> list[str]:
    """What is above the table; a case that it does not have is above it, too."""
    limit = limits.get(plan["case"])
    if limit is None:
        return [f"{plan['case']} is not in {PATH.name}"]
    found = facts(plan)
    above = [name for name in found if name not in limit or _above(found[name], limit[name])]
    return [f"{plan['case']}: {name} {found[name]}, the limit is {limit.get(name)}" for name in above]


def _above(found: Iterable[float], limit: Iterable[float]) -> bool:
    return any(f > at_most for f, at_most in zip(found, limit, strict=True))


def tightened(limits: Limits, found: Iterable[Mapping[str, Any]], may_rise: bool) -> Limits:
    """The table after these plans: each number the smaller one, unless it may rise."""
    result = {name: dict(limit) for name, limit in limits.items()}
    for plan in found:
        new, old = facts(plan), result.get(plan["case"])
        lower = {n: list(map(min, new[n], old[n])) for n in new if n in old} if old and not may_rise else {}
        result[plan["case"]] = {**(old or {}), **new, **lower}
    return result


def write(limits: Limits, path: Path = PATH) -> None:
    """One case a line, so that a change reads well."""
    _write({name: _part(limit, False) for name, limit in limits.items()}, path)
    of_code = {name: _part(limit, True) for name, limit in limits.items()}
    _write({name: limit for name, limit in of_code.items() if limit}, path.with_name(COMPILED))


def _part(limit: Facts, of_code: bool) -> Facts:
    return {name: numbers for name, numbers in limit.items() if name.startswith(INSTRUCTIONS) == of_code}


def _write(limits: Limits, path: Path) -> None:
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(limit)}" for name, limit in sorted(limits.items()))
    path.write_text(f"{{\n{lines}\n}}\n")
