"""How wide a kernel reads and writes what it streams: the tensors that make up its bytes, not scalars and partial sums.

The ends of a row that begins or stops inside a group of 16 bytes are written element by element, less than a group at
either end; such stores are counted by themselves.
PTX names the source line of every access, and the line of the kernel's text names the pointer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

import sympy

from fusegrad.codegen import Kernel
from fusegrad.runtime.kernels.cross_compile.metrics import _ptx_widths
from fusegrad.runtime.values.sizes import number

Widths = dict[str, dict[int, int]]
STREAMED = 1 / 32
"""Of the bytes of the kernel's largest tensor."""

_PLACE = re.compile(r"\.py:(\d+):\d+")
_TOUCHED = re.compile(r"tl\.(load|store)\((\w+)")
_END = re.compile(r"mask=\w+ & ~whole\w*\)")


def streamed(kernel: Kernel, sizes: Mapping[sympy.Symbol, int]) -> set[str]:
    """The pointers through which most of its bytes go, by name."""
    moved = {**kernel.reads, **kernel.writes}
    own = {f"{buffer.name}_ptr" for buffer in kernel.scratch}
    known = {name: _number(size, sizes) for name, size in moved.items() if name not in own}
    return {name for name, size in known.items() if size >= STREAMED * max(known.values())}


def _number(size: sympy.Expr | int, sizes: Mapping[sympy.Symbol, int]) -> float:
    unknown = getattr(size, "free_symbols", set()) - set(sizes)
    return float("inf") if unknown else float(number(size, dict(sizes)))


def widths(text: str, ptx: str, pointers: set[str]) -> Widths:
    """{"load": {16: 4}, "store": {16: 2}, "end": {}}: accesses through these pointers by bytes each."""
    lines = text.splitlines()
    found: dict[str, Counter[int]] = {"load": Counter(), "store": Counter(), "end": Counter()}
    for place, width in _accesses(ptx):
        said = " ".join(lines[n - 1] for n in place if 0 < n <= len(lines))
        for kind, pointer in _TOUCHED.findall(said):
            if pointer in pointers:
                found["end" if kind == "store" and _END.search(said) else kind][width] += 1
                break
    return {kind: dict(sorted(counts.items())) for kind, counts in found.items()}


def _accesses(ptx: str) -> Iterator[tuple[list[int], int]]:
    """(source lines, from the innermost call out, and bytes) of every global access."""
    place: list[int] = []
    for line in ptx.splitlines():
        if line.lstrip().startswith(".loc"):
            place = [int(n) for n in _PLACE.findall(line)]
        yield from ((place, width) for width in _ptx_widths(line))


def share(counts: Mapping[int, int] | Mapping[str, int]) -> float | None:
    """Of the bytes, those moved sixteen at a time; None of no access."""
    moved = {int(width): int(width) * n for width, n in counts.items()}
    return sum(m for width, m in moved.items() if width >= 16) / sum(moved.values()) if moved else None
