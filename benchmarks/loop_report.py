"""The table of loops over time: what is planned for each, and the largest of what its kernels need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .kernels import TARGETS
from .stream_report import moved_over_least

Row = Sequence[str]

LOOPS = "Loops over time"
LOOPS_HEAD = (
    "case", "", "launches", "by the library", "bytes / minimal", "eager", "saved, MB", "asked, MB",
    "registers 80 90 100 942", "spills",
)  # fmt: skip
NOTES = {
    LOOPS: "Nothing was run or timed: plans for an H100 (`benchmarks/loop_functions.py`), and machine code that was "
    "compiled for sm_80, sm_90, sm_100 and gfx942. Each class is a Python loop over its steps in float32, as a user "
    "writes it. Forward, then backward. Launches of all kernels and calls, and of them those by the library. Bytes "
    "that the plan moves, over every input read once and every output written once; eager: the same for the class's "
    "own operations, one by one. Saved: what forward saves for backward; asked: what the class itself would. Registers "
    "of a thread, and the bytes of it that are spilled: the most of the case's kernels on each target."
}


def loop_rows(results: Mapping[str, Any]) -> list[Row]:
    """One a case."""
    return [list(_cells(row)) for row in results["loops"]["rows"]]


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    yield from (row["case"], row["what"])
    yield from (" + ".join(map(str, row[name])) for name in ("launches", "library"))
    yield from moved_over_least(row)
    yield from (f"{row[name] / 1e6:.1f}" for name in ("saved", "asked"))
    yield from (" ".join(_most(row["targets"].get(target, {}), name) for target in TARGETS)
                for name in ("registers", "spills"))  # fmt: skip


def _most(needs: Mapping[str, Any], name: str) -> str:
    """The largest of the kernels; "error" where one is not compiled."""
    if any(need["error"] for need in needs.values()):
        return "error"
    return str(max((need[name] for need in needs.values()), default="-"))


SECTIONS = ((LOOPS, LOOPS_HEAD, loop_rows, ("loops",)),)
