"""What the machine code needs: registers, spills, shared memory and access widths, cross-compiled for every target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from fusegrad import explain
from fusegrad.runtime import workers

from .plans import DIRECTIONS
from .suite import Case

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")


def one_compiler() -> None:
    """As many compiler processes as there are processes that ask for binaries."""
    workers.SIZE = 1


def kernels(case: Case) -> dict[str, Any]:
    """Per target what the kernels that are generated for it need; the worst of each direction's kernels."""
    return {"case": case.name, "targets": {target: _needs(case, target) for target in TARGETS}}


def _needs(case: Case, target: str) -> list[dict[str, Any] | None]:
    found = explain(case.function, *case.args, target=target)
    if not found.kernel_records:
        return [None, None]
    binaries = {name: by[target] for name, by in found.binaries(target).items()}
    names = {d: [k.name for k in found.kernels if k.direction == d and k.name in binaries] for d in DIRECTIONS}
    return [_worst([binaries[n] for n in names[d]]) for d in DIRECTIONS]


def _worst(binaries: Iterable[workers.Binary]) -> dict[str, Any] | None:
    each = list(binaries)
    if not each:
        return None
    accesses = sum((Counter(b.accesses) for b in each), Counter())
    return {
        "registers": max(b.registers for b in each),
        "spills": max(b.spills for b in each),
        "shared": max(b.shared for b in each),
        "accesses": {str(width): n for width, n in sorted(accesses.items(), reverse=True)},
        "errors": [b.error for b in each if b.error],
    }


def wide_share(accesses: dict[str, int]) -> float:
    """Of the bytes that the accesses in a kernel's text move, those that move sixteen at a time."""
    moved = {int(width): int(width) * n for width, n in accesses.items()}
    return sum(m for width, m in moved.items() if width >= 16) / max(1, sum(moved.values()))
