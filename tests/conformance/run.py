"""`make conformance`: the table of docs/conformance.md. Eager, fusegrad and torch.compile in one process, cell by cell.

    python tests/conformance/run.py [--backend reference] [--compiler aot_eager] [--only Sort] [--out conformance.md]

Exits with 1 where fusegrad is worse than eager anywhere.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cells import CLASSES, NOTHING, OPINFOS, RAISES, RIGHT, WRONG, Outcome, expected, ours, outcome
from compositions import COMPOSITIONS

import fusegrad

ROOT = Path(__file__).resolve().parents[2]
WORSE = {(RIGHT, RAISES), (RIGHT, WRONG), (RAISES, WRONG), (WRONG, WRONG)}
Cell = tuple[str, str]


@dataclass(frozen=True)
class Row:
    """One cell of the table by the three that run it, and which methods ran as written under fusegrad."""

    eager: Outcome
    fusegrad: Outcome
    compiled: Outcome
    opaque: list[str]

    @property
    def worse(self) -> bool:
        return (self.eager.status, self.fusegrad.status) in WORSE


def measured(name: str, composition: str, backend: str, compiler: str) -> Row:
    wanted = expected(name, composition)
    eager = outcome(name, composition, wanted, CLASSES)
    fast, opaque = ours(name, composition, wanted, backend)
    torch._dynamo.reset()
    around = torch.compile(backend=compiler)
    return Row(eager, fast, outcome(name, composition, wanted, CLASSES, around), opaque)


# ------------------------------------------------------------------ the text
def table(rows: Mapping[Cell, Row]) -> list[str]:
    names = list(dict.fromkeys(name for name, _ in rows))
    lines = [f"| | {' | '.join(COMPOSITIONS)} |", f"|---|{'---|' * len(COMPOSITIONS)}"]
    for name in names:
        lines.append(f"| {name} | {' | '.join(shown(rows[name, c]) for c in COMPOSITIONS)} |")
    return lines


def shown(row: Row) -> str:
    if row.eager.status == NOTHING:
        return "·"
    marks = {RIGHT: "✓", RAISES: "!", WRONG: "**✗**"}
    return " ".join(marks[o.status] for o in (row.eager, row.fusegrad, row.compiled))


def counts(rows: Mapping[Cell, Row]) -> list[str]:
    lines = ["| | right | raises | silently wrong |", "|---|---|---|---|"]
    for label, pick in PICKS.items():
        found = Counter(pick(r).status for r in rows.values())
        lines.append(f"| {label} | {found[RIGHT]} | {found[RAISES]} | {found[WRONG]} |")
    return lines


PICKS: dict[str, Any] = {"eager": lambda r: r.eager, "fusegrad": lambda r: r.fusegrad,
                         "torch.compile": lambda r: r.compiled}  # fmt: skip


def how_ours_ran(rows: Mapping[Cell, Row]) -> list[str]:
    lines = ["| | compiled | in part | as written |", "|---|---|---|---|"]
    for name in dict.fromkeys(name for name, _ in rows):
        found = Counter(r.fusegrad.how for (n, _), r in rows.items() if n == name)
        lines.append(f"| {name} | {found['compiled']} | {found['in part']} | {found['as written']} |")
    return lines


def reasons(rows: Mapping[Cell, Row]) -> list[str]:
    told = (reason.rpartition(" (")[0] for r in rows.values() for reason in r.opaque)
    return [f"- `{reason.partition(':')[0]}`:{reason.partition(':')[2]}" for reason in dict.fromkeys(told)]


def notable(rows: Mapping[Cell, Row], label: str, status: str) -> list[str]:
    pick = PICKS[label]
    return [f"- {n}, {c}: {pick(r).message}" for (n, c), r in rows.items() if pick(r).status == status]


LEGEND = """\
The Functions are the OpInfos of `torch.testing._internal.autograd_function_db`, under each composition. In a cell:
eager, fusegrad, torch.compile; ✓ right, ! raises, **✗** silently wrong, · does not apply. What is right is computed by
loops of plain eager autograd (reverse mode, dual numbers), a sample and a direction at a time, without torch.func.
Where even that raises, a result counts as wrong."""


def document(rows: Mapping[Cell, Row], backend: str, compiler: str) -> str:
    """The whole page."""
    worse = [f"- {n}, {c}: {r.eager} -> {r.fusegrad}" for (n, c), r in rows.items() if r.worse]
    parts = [
        ["# Conformance"],
        [f"Written by `make conformance` on {datetime.date.today()}: fusegrad {fusegrad.__version__} (backend "
         f"`{backend}`), torch {torch.__version__} (torch.compile with backend `{compiler}`), "
         f"Python {platform.python_version()}, CPU."],
        [LEGEND],
        counts(rows), table(rows),
        ["Worse than eager under fusegrad:"], worse or ["nothing."],
        ["## How fusegrad ran them"], how_ours_ran(rows),
        ["The methods that ran as written, and why:"],
        reasons(rows),
        ["## Where eager raises"], notable(rows, "eager", RAISES) or ["nowhere."],
        ["## Where eager is silently wrong"], notable(rows, "eager", WRONG) or ["nowhere."],
        ["## Where torch.compile is silently wrong"], notable(rows, "torch.compile", WRONG) or ["nowhere."],
        ["## Where torch.compile raises and eager does not"],
        [f"- {n}, {c}: {r.compiled.message}" for (n, c), r in rows.items()
         if r.compiled.status == RAISES and r.eager.status == RIGHT] or ["nowhere."],
    ]  # fmt: skip
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--compiler", default="aot_eager", help="torch.compile's backend")
    parser.add_argument("--only", default="", help="Functions whose name holds this")
    parser.add_argument("--out", default=str(ROOT / "docs" / "conformance.md"))
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows: dict[Cell, Row] = {}
    for name in (n for n in OPINFOS if asked.only in n):
        for composition in COMPOSITIONS:
            rows[name, composition] = measured(name, composition, asked.backend, asked.compiler)
        print(f"{name:26}", *(shown(rows[name, c]).replace("*", "") for c in COMPOSITIONS), sep="  ", flush=True)
    Path(asked.out).parent.mkdir(exist_ok=True)
    Path(asked.out).write_text(document(rows, asked.backend, asked.compiler), encoding="utf-8")
    print(f"written to {asked.out}")
    return int(any(row.worse for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
