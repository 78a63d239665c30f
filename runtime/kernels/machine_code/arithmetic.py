"""What integer instructions compute, for one lane: a table from their names to functions on words of 32 bits.

Only what loops and branches are decided by: addresses of data, floats and loaded numbers are unknown (None), and so is
whatever is computed from them. A rule is given operands as numbers and returns the results in the order of the
destinations: predicates, then words.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

MASK = 0xFFFFFFFF
Words = Sequence[int]


def signed(word: int) -> int:
    """The word as a number of two's complement."""
    return word - (1 << 32) if word & 0x80000000 else word


def signed_pair(low: int, high: int) -> int:
    return (signed(high) << 32) | low


def table_of_three(a: int, b: int, c: int, table: int) -> int:
    """LOP3: bit i of the result is the bit of the table that bits i of a, b and c name."""
    result = 0
    for row in range(8):
        if table >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result & MASK


def permuted(a: int, selector: int, b: int) -> int:
    """PRMT: four bytes out of eight, each repeated as its sign where bit 3 says so."""
    data, result = a | b << 32, 0
    for place in range(4):
        choice = selector >> 4 * place & 0xF
        byte = data >> 8 * (choice & 7) & 0xFF
        if choice & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << 8 * place
    return result


COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b, "LE": lambda a, b: a <= b, "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b, "EQ": lambda a, b: a == b, "NE": lambda a, b: a != b,
    "T": lambda a, b: True, "F": lambda a, b: False,
}  # fmt: skip
COMBINATIONS: dict[str, Callable[[bool, bool], bool]] = {
    "AND": lambda a, b: a and b, "OR": lambda a, b: a or b, "XOR": lambda a, b: a != b,
}  # fmt: skip


def compare(modifiers: Words | Sequence[str], a: int, b: int, lower: bool | None) -> bool:
    """One comparison; of upper words, `lower` says how the lower ones compare."""
    how = next(m for m in modifiers if m in COMPARISONS)
    if "U32" not in modifiers:
        a, b = signed(a), signed(b)
    if "EX" not in modifiers or lower is None:
        return COMPARISONS[how](a, b)
    if how in ("EQ", "NE"):
        return (a == b and lower) if how == "EQ" else (a != b or lower)
    return (a != b and COMPARISONS[how](a, b)) or (a == b and lower)


def to_float_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def from_float_bits(word: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", word))[0])


def shifted_left(low: int, amount: int, high: int, wants_high: bool) -> int:
    both = (high << 32 | low) << min(amount, 64)
    return (both >> 32 if wants_high else both) & MASK


def shifted_right(low: int, amount: int, high: int, modifiers: Sequence[str]) -> int:
    """SHF.R: of 64 bits; with .HI the upper word of the result."""
    upper = signed(high) if "S32" in modifiers or "S64" in modifiers else high
    both = (upper << 32 | low) >> min(amount, 64)
    return (upper >> min(amount, 63) if "HI" in modifiers else both) & MASK
