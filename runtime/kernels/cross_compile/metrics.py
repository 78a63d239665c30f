"""Registers, memory and accesses of a compiled kernel, from its machine code. Stands alone: workers load it by path.

NVIDIA: registers and stack from `cuobjdump -res-usage` (it comes with Triton), access widths from the PTX, whose global
accesses ptxas neither joins nor splits. AMD: everything from the assembly text.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Metrics:
    """Registers and spilled bytes per thread (-1: unknown), shared bytes per program, global accesses by bytes each;
    bytes of device memory that each program keeps descriptors in."""

    registers: int = -1
    spills: int = -1
    shared: int = 0
    accesses: dict[int, int] = field(default_factory=dict)
    workspace: int = 0


def measure(
    asm: Mapping[str, str | bytes], target: str, shared: int = 0, tools: Path | None = None, workspace: int = 0
) -> Metrics:
    """Metrics of a binary for "cuda:90", "hip:gfx942"...; `shared`, the dynamic part, and `workspace` Triton knows."""
    if target.startswith("hip"):
        return _of_amdgcn(str(asm["amdgcn"]), shared)
    (registers, stack), ptx = _of_cubin(asm["cubin"], tools), str(asm["ptx"])
    return Metrics(registers, _spilled(stack, ptx), shared, _by_width(_ptx_widths(ptx)), workspace)


def _by_width(widths: Iterator[int]) -> dict[int, int]:
    return dict(sorted(Counter(widths).items()))


# -- NVIDIA -----------------------------------------------------------------------------------------------------------

_USAGE = re.compile(r"\b(REG|STACK|LOCAL):(\d+)")
_TABLE = re.compile(r"\.local\s+\.align\s+\d+\s+\.b8\s+\w+\[(\d+)\]")
_ACCESS = re.compile(r"\b(?:ld|st)\.((?:[\w:]+\.)*global(?:\.[\w:]+)*)")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[\w.:]*\s*\[[^]]*\],\s*\[[^]]*\],\s*(0x[0-9a-f]+|\d+)")


def _of_cubin(cubin: str | bytes, tools: Path | None) -> tuple[int, int]:
    """(registers, stack bytes); -1, -1 where the tool is missing or fails."""
    if tools is None or not isinstance(cubin, bytes):
        return -1, -1
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            command = [str(tools / "cuobjdump"), "-res-usage", file.name]
            process = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return -1, -1
    usage = {name: int(count) for name, count in _USAGE.findall(process.stdout)}
    return usage.get("REG", -1), max(usage.get("STACK", -1), usage.get("LOCAL", -1))


def _spilled(stack: int, ptx: str) -> int:
    """Bytes of the stack without the tables that the text asks for: digits of 2 / pi, for the sine of large numbers."""
    tables = sum(-(-int(size) // 8) * 8 for size in _TABLE.findall(ptx))
    return max(0, stack - tables) if stack >= 0 else stack


def _ptx_widths(ptx: str) -> Iterator[int]:
    """ld.global.L1::evict_last.v4.b32 -> 16;  cp.async.cg.shared.global [..], [..], 0x10 -> 16"""
    for access in _ACCESS.findall(ptx):
        words = access.split(".")
        lanes = next((int(word[1:]) for word in words if re.fullmatch(r"v\d", word)), 1)
        bits = next(int(word[1:]) for word in reversed(words) if re.fullmatch(r"[busf]\d+", word))
        yield lanes * bits // 8
    yield from (int(count, 0) for count in _COPY.findall(ptx))


# -- AMD --------------------------------------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r"^\s*(?:global|buffer|flat)_(?:load|store)_(?:lds_)?(\w+)", re.M)
_DWORDS = re.compile(r"dword(?:x(\d))?")
_FUNCTION_END = re.compile(r"^\.Lfunc_end\d+:", re.M)
_OF_AN_ASSERTION = re.compile(r"^__ockl_\w+:", re.M)
"""Functions that print what an assertion says; a kernel calls them when it fails, and never before."""


def _of_amdgcn(text: str, shared: int) -> Metrics:
    text = "".join(part for part in _FUNCTION_END.split(text) if not _OF_AN_ASSERTION.search(part))
    spills = 4 * _fact(text, "vgpr_spill_count")  # a register holds 4 bytes per thread
    return Metrics(_fact(text, "vgpr_count"), spills, shared, _by_width(_isa_widths(text)))


def _fact(text: str, name: str) -> int:
    match = re.search(rf"^\s*-?\s*\.{name}:\s+(\d+)", text, re.M)
    return int(match[1]) if match else -1


def _isa_widths(text: str) -> Iterator[int]:
    """buffer_load_dwordx4 -> 16;  global_load_ushort, global_store_short_d16_hi -> 2;  global_store_b64 -> 8"""
    for kind in _INSTRUCTION.findall(text):
        dwords, bits = _DWORDS.match(kind), re.match(r"(?:d16_)?(?:hi_)?[bui](\d+)", kind)
        if dwords:
            yield 4 * int(dwords[1] or 1)
        elif bits:
            yield int(bits[1]) // 8
        else:
            yield 1 if "byte" in kind else 2
