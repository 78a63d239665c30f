"""Loops over time: what is planned for each on sm_90, and what its kernels need on each target. Compiled, not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusegrad import explain
from fusegrad.runtime.kernels.cross_compile.pool import Binary
from fusegrad.runtime.report.explanation import Explanation

from .kernels import TARGETS
from .loop_functions import LOOPS
from .plans import TARGET
from .stream_kernels import planned

NEEDS = ("registers", "spills", "shared", "error")


def loops(name: str, targets: Sequence[str] = TARGETS) -> dict[str, Any]:
    """A row of the results."""
    words, case = LOOPS[name]
    found = {target: explain(case.function, *case.args, target=target) for target in {TARGET, *targets}}
    needs = {target: _needs_of(found[target], target) for target in targets}
    return {"case": name, "what": words, **planned(found[TARGET]), "targets": needs}


def _needs_of(found: Explanation, target: str) -> dict[str, Any]:
    """By kernel."""
    binaries = found.binaries(target) if found.kernel_records else {}
    return {k.name: _need(binaries[k.name][target]) for k in found.kernel_records}


def _need(binary: Binary) -> dict[str, Any]:
    return {name: getattr(binary, name) for name in NEEDS}
