"""NVIDIA machine code as instructions in their order, by the disassembler that comes with Triton."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ....ir.errors import FusegradError

TIMEOUT = 60.0
LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P(?:\d|T))\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
LABEL = re.compile(r"^(\.?[\w.$]+):\s*$")
TARGET = re.compile(r"`\(([^)]+)\)")
SECTION = re.compile(r"^//-+ (\S+)")


class NoListingError(FusegradError):
    """There is no machine code to read, or nothing that reads it."""

    message = "the machine code of {kernel} is not read: {reason}\n  at:   {where}\n  fix:  {fix}"


@dataclass(frozen=True)
class Instruction:
    """`@!P0 IMAD.WIDE R2, R0, 0x4, R4` at byte `at`: guard "!P0", op "IMAD.WIDE", operands as they are written.

    `target`: the address that a branch or a call names.
    """

    at: int
    guard: str
    op: str
    operands: tuple[str, ...]
    target: int | None = None

    @functools.cached_property
    def base(self) -> str:
        """The name without its modifiers: IMAD."""
        return self.op.partition(".")[0]

    def is_a(self, *modifiers: str) -> bool:
        """Whether the name has one of these modifiers."""
        return any(m in self.op.split(".")[1:] for m in modifiers)


Listing = tuple[Instruction, ...]


def tools() -> Path | None:
    """The folder of Triton's own copies of NVIDIA's binary tools; None where this Triton has none."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return folder if (folder / "nvdisasm").exists() else None


@functools.lru_cache(maxsize=256)
def disassemble(cubin: bytes, kernel: str = "a kernel") -> Listing:
    """The instructions of a cubin with one kernel. Raises NoListingError."""
    listing = parse(_text(cubin, kernel))
    if not listing:
        raise NoListingError(kernel=kernel, reason="the disassembler shows no instruction", fix="report the cubin.")
    return listing


def _text(cubin: bytes, kernel: str) -> str:
    folder = tools()
    if folder is None:
        fix = "install a triton with backends/nvidia/bin/nvdisasm (the wheels of 3.6 and 3.7 have it)."
        raise NoListingError(kernel=kernel, reason="this triton ships no nvdisasm", fix=fix)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(folder / "nvdisasm"), "-c", file.name]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise NoListingError(kernel=kernel, reason=f"nvdisasm failed: {error}", fix="run it by hand.") from error


def parse(text: str) -> Listing:
    """The instructions of the text's code, with the addresses that labels stand for."""
    labels: dict[str, int] = {}
    pending: list[str] = []
    rows: list[tuple[int, str, str, str]] = []
    for line in text.splitlines():
        if label := LABEL.match(line):
            pending.append(label[1])
        elif row := LINE.match(line):
            at = int(row[1], 16)
            labels |= dict.fromkeys(pending, at)
            pending.clear()
            rows.append((at, row[2] or "", row[3], row[4]))
    return tuple(_instruction(*row, labels) for row in rows)


def _instruction(at: int, guard: str, op: str, rest: str, labels: dict[str, int]) -> Instruction:
    name = TARGET.search(rest)
    operands = tuple(_operands(TARGET.sub("", rest)))
    return Instruction(at, guard, op, operands, labels.get(name[1]) if name else None)


def _operands(text: str) -> Iterator[str]:
    for part in text.split(","):
        if word := part.strip().replace(".reuse", ""):
            yield word
