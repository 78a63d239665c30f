"""What the machine code needs: registers, spills, shared memory and access widths, cross-compiled for every target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy

from fusegrad import explain
from fusegrad.codegen import Kernel
from fusegrad.runtime.kernels.cross_compile import pool as workers
from fusegrad.runtime.kernels.cross_compile.pool import Binary
from fusegrad.runtime.report.explanation import Explanation
from fusegrad.runtime.values.tensor_specs import is_spec, parse_spec

from . import streams
from .plans import DIRECTIONS
from .suite import Case

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")


def one_compiler() -> None:
    """As many compiler processes as there are processes that ask for binaries."""
    workers.SIZE = 1


def kernels(case: Case, targets: Sequence[str] = TARGETS) -> dict[str, Any]:
    """Per target what the kernels that are generated for it need; the worst of each direction's kernels."""
    return {"case": case.name, "targets": {target: _needs(case, target) for target in targets}}


def _needs(case: Case, target: str) -> list[dict[str, Any] | None]:
    found = explain(case.function, *case.args, target=target)
    if not found.kernel_records:
        return [None, None]
    binaries = {name: by[target] for name, by in found.binaries(target).items()}
    sizes = _sizes(case, found)
    direction = {k.name: k.direction for k in found.kernels}
    needs = [(direction[k.name], _need(k, binaries[k.name], found.module, sizes)) for k in found.kernel_records]
    return [_worst([need for of, need in needs if of == d]) for d in DIRECTIONS]


def _sizes(case: Case, found: Explanation) -> dict[sympy.Symbol, int]:
    """The symbols' values, read off forward's arguments."""
    shapes = [parse_spec(a)[1] for a in case.args if is_spec(a)]
    pairs = (pair for v, s in zip(found.graph().inputs, shapes, strict=False) for pair in zip(v.shape, s, strict=True))
    return {symbol: size for symbol, size in pairs if isinstance(symbol, sympy.Symbol)}


def _need(kernel: Kernel, binary: Binary, module: str, sizes: Mapping[sympy.Symbol, int]) -> dict[str, Any]:
    text, ptx = workers.reachable(module, kernel.name), str(binary.asm.get("ptx", ""))
    return {
        "registers": binary.registers,
        "spills": binary.spills,
        "shared": binary.shared,
        "accesses": Counter(binary.accesses),
        "streams": streams.widths(text, ptx, streams.streamed(kernel, sizes)),
        "errors": [binary.error] if binary.error else [],
    }


def _worst(needs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The largest figure of several kernels; accesses are added up."""
    if not needs:
        return None
    streamed = {kind: _by_width(Counter(n["streams"][kind]) for n in needs) for kind in ("load", "store", "end")}
    return {
        **{name: max(n[name] for n in needs) for name in ("registers", "spills", "shared")},
        "accesses": _by_width(n["accesses"] for n in needs),
        "streams": streamed,
        "errors": [e for n in needs for e in n["errors"]],
    }


def _by_width(counts: Iterable[Counter[int]]) -> dict[str, int]:
    return {str(width): n for width, n in sorted(sum(counts, Counter()).items(), reverse=True)}
