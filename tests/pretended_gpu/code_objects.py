"""What a binary says of the parameters of its kernels: a cubin of NVIDIA's, or a code object of AMD's. Both are ELF."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KPARAM_INFO, SIZED = 0x17, 4
AMD_MACHINE, AMD_METADATA = 224, 32


@dataclass(frozen=True)
class Interface:
    """Of one kernel. sizes: of its parameters, in bytes; threads: the most in a program, 0 where it does not say."""

    sizes: list[int]
    threads: int = 0


def interface_of(image: int, name: str) -> Interface:
    """The parameters of a kernel as its binary in memory has them."""
    (machine,) = struct.unpack_from("<H", ctypes.string_at(image, 20), 18)
    return _of_code_object(image, name) if machine == AMD_MACHINE else Interface(_of_cubin(image, name))


def _sections(image: int) -> Iterator[tuple[str, bytes]]:
    header = ctypes.string_at(image, 64)
    assert header[:4] == b"\x7fELF"
    (table,), (_, count, names) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HHH", header, 58)
    sections = [struct.unpack("<IIQQQQIIQQ", ctypes.string_at(image + table + 64 * i, 64)) for i in range(count)]
    for name, kind, _, _, offset, size, *_ in sections:
        text = ctypes.string_at(image + sections[names][4] + name).decode()
        yield text, b"" if kind == NO_BITS else ctypes.string_at(image + offset, size)


NO_BITS = 8


def _section(image: int, wanted: str) -> bytes:
    return next((content for name, content in _sections(image) if name == wanted), b"")


# ------------------------------------------------------------------ NVIDIA's: a table of attributes for each kernel
def _of_cubin(image: int, name: str) -> list[int]:
    info = _section(image, f".nv.info.{name}")
    sizes: dict[int, int] = {}
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if form == SIZED and attribute == KPARAM_INFO:
            _, ordinal, _, flags = struct.unpack_from("<IHHI", info, at + 4)
            sizes[ordinal] = flags >> 18
        at += 4 + (size if form == SIZED else 0)
    return [sizes[n] for n in range(len(sizes))]


# ------------------------------------------------------------------ AMD's: a note with a document in MessagePack
def _of_code_object(image: int, name: str) -> Interface:
    """Parameters lie side by side in the segment of arguments; behind them, hidden ones that the runtime fills."""
    note = _section(image, ".note")
    name_size, size, kind = struct.unpack_from("<III", note)
    assert kind == AMD_METADATA and note[12 : 12 + name_size] == b"AMDGPU\0"
    start = 12 + -(-name_size // 4) * 4
    document, _ = _unpacked(note[start : start + size], 0)
    (kernel,) = (k for k in document["amdhsa.kernels"] if k[".name"] == name)
    parameters = [p for p in kernel[".args"] if not p[".value_kind"].startswith("hidden")]
    end = 0
    for parameter in parameters:
        place, length = parameter[".offset"], parameter[".size"]
        assert place == -(-end // length) * length, f"a parameter of {length} bytes lies at {place}, behind {end}"
        end = place + length
    assert end <= kernel[".kernarg_segment_size"]
    return Interface([p[".size"] for p in parameters], kernel[".max_flat_workgroup_size"])


def _unpacked(packed: bytes, at: int) -> tuple[Any, int]:
    """A value of MessagePack, and where the next one begins: of the forms that such a document has."""
    form = packed[at]
    if form < 0x80 or form >= 0xE0:
        return form if form < 0x80 else form - 256, at + 1
    if form < 0x90:
        return _map(packed, at + 1, form & 15)
    if form < 0xA0:
        return _list(packed, at + 1, form & 15)
    if form < 0xC0:
        return packed[at + 1 : at + 1 + (form & 31)].decode(), at + 1 + (form & 31)
    if form in _CONSTANTS:
        return _CONSTANTS[form], at + 1
    kind, width = _WIDE[form]
    number, after = int.from_bytes(packed[at + 1 : at + 1 + width], "big", signed=kind == "signed"), at + 1 + width
    if kind == "map":
        return _map(packed, after, number)
    if kind == "list":
        return _list(packed, after, number)
    return (packed[after : after + number].decode(), after + number) if kind == "text" else (number, after)


_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_WIDE = {
    **{0xCC + n: ("number", 1 << n) for n in range(4)}, **{0xD0 + n: ("signed", 1 << n) for n in range(4)},
    **{0xD9 + n: ("text", 1 << n) for n in range(3)}, 0xDC: ("list", 2), 0xDD: ("list", 4), 0xDE: ("map", 2),
    0xDF: ("map", 4),
}  # fmt: skip


def _list(packed: bytes, at: int, count: int) -> tuple[list[Any], int]:
    found = []
    for _ in range(count):
        value, at = _unpacked(packed, at)
        found.append(value)
    return found, at


def _map(packed: bytes, at: int, count: int) -> tuple[dict[Any, Any], int]:
    flat, at = _list(packed, at, 2 * count)
    return dict(zip(flat[::2], flat[1::2], strict=True)), at
