"""Operands of an instruction: which of them are written, the registers that it reads, and their values in a lane."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from .arithmetic import MASK
from .pipes import width
from .sass import Instruction

PREDICATE = re.compile(r"^U?P(?:\d|T)$")
REGISTER = re.compile(r"\b(U?R(?:\d+|Z)|U?P(?:\d|T))\b")
CONSTANT = re.compile(r"c\[(0x[0-9a-f]+)\]\[(?:0x)?([0-9a-f]+)\]")
NUMBER = re.compile(r"^-?(?:0x[0-9a-f]+|\d+)$")
ADDRESS = re.compile(r"\[([^\]]*)\](?!\[)")
SPILLED = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")
"""The place of a register that is spilled, in the memory of its thread: another register."""
ALWAYS: Final = {"RZ": 0, "URZ": 0, "PT": True, "UPT": True}
CARRYING = ("IADD3", "UIADD3", "LEA", "ULEA", "IMAD", "UIMAD", "LOP3", "ULOP3", "IADD")
TWO_PREDICATES = ("ISETP", "UISETP", "PLOP3", "UPLOP3", "FSETP", "DSETP", "HSETP2")
NO_RESULT = ("ST", "RED", "BAR", "BRA", "EXIT", "BSSY", "BSYNC", "CALL", "RET", "MEMBAR", "CCTL", "LDGSTS", "NOP",
             "DEPBAR", "LDGDEPBAR", "WARPSYNC", "ERRBAR", "YIELD", "UTMA", "SYNCS", "FENCE")  # fmt: skip
State = dict[str, int | None]


@dataclass(frozen=True)
class Operands:
    """Destinations (registers of a pair one by one), and sources as they are written."""

    predicates: tuple[str, ...]
    words: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def results(self) -> tuple[str, ...]:
        return (*self.predicates, *self.words)


@functools.lru_cache(maxsize=1 << 15)
def operands_of(instruction: Instruction) -> Operands:
    """The instruction's operands, by the place that its kind gives them."""
    given, at = instruction.operands, 0
    if instruction.base in ("STL", "LDL") and any(map(SPILLED.fullmatch, given)):
        return Operands((), *_spilled(instruction))
    if instruction.base == "SYNCS" and instruction.is_a("PHASECHK"):
        return Operands(given[:1], (), given[1:])
    if instruction.base.startswith(NO_RESULT):
        return Operands((), (), given)
    if instruction.base == "R2P":
        return Operands(tuple(_packed(given[-1])), (), given[1:])
    if instruction.base == "P2R":
        return Operands((), given[:1], (*_packed(given[-1]), *given[2:]))
    if instruction.base in TWO_PREDICATES:
        return Operands(given[:2], (), given[2:])
    while at < len(given) and PREDICATE.match(given[at]):
        at += 1
    if at == len(given):
        return Operands(given, (), ())
    first, word = at, given[at]
    at += 1
    while instruction.base in CARRYING and at < len(given) and PREDICATE.match(given[at]):
        at += 1
    predicates = (*given[:first], *given[first + 1 : at])
    return Operands(predicates, tuple(neighbours(word, _words(instruction))), given[at:])


def _spilled(instruction: Instruction) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words that a spill or its return writes, and those that it reads: registers and places, or the other way."""
    stores, count = instruction.base == "STL", max(1, width(instruction) // 4)
    place, word = instruction.operands if stores else instruction.operands[::-1]
    first = int((SPILLED.fullmatch(place) or [""])[1] or "0", 16)
    places, words = tuple(f"[R1+{first + 4 * i:#x}]" for i in range(count)), tuple(neighbours(word, count))
    return (places, words) if stores else (words, places)


def _packed(mask: str) -> Iterator[str]:
    """The predicates that a mask names: 0x41 -> P0 P6."""
    return (f"P{i}" for i in range(7) if int(mask, 0) >> i & 1)


def _words(instruction: Instruction) -> int:
    base = instruction.base
    if instruction.is_a("WIDE", "64") or base.startswith("D") or (base == "CS2R" and not instruction.is_a("32")):
        return 2
    if base.startswith(("LD", "ULDC", "ATOM")):
        return max(1, width(instruction) // 4)
    return 4 if base.endswith("MMA") and base != "HFMA2" else 2 if instruction.is_a("F64", "S64", "U64") else 1


def neighbours(word: str, count: int) -> Iterator[str]:
    """R4, 2 -> R4 R5."""
    stem, digits = re.match(r"(U?R)(\d+|Z)", word).groups() if REGISTER.match(word) else (word, "")  # type: ignore[union-attr]
    yield from (word,) if not digits.isdigit() else (f"{stem}{int(digits) + i}" for i in range(count))


@functools.lru_cache(maxsize=1 << 15)
def registers_read(instruction: Instruction) -> frozenset[str]:
    """The registers and predicates that its result depends on, pairs as pairs."""
    names = {name for text in operands_of(instruction).sources for name in _read_of(text, instruction)}
    return frozenset((names | set(REGISTER.findall(instruction.guard))) - set(ALWAYS))


def _read_of(text: str, instruction: Instruction) -> Iterator[str]:
    """Those of one source: an address is a pair, so may be what a wide operation takes; a store has words."""
    is_wide = ".64" in text or "desc" in text or instruction.is_a("WIDE", "HI", "64")
    if SPILLED.fullmatch(text) and instruction.base == "LDL":
        yield text
        return
    stores = instruction.base.startswith("ST") and instruction.base != "STL"
    count = max(1, width(instruction) // 4) if stores and "[" not in text else 1 + is_wide
    for name in REGISTER.findall(text):
        yield from neighbours(name, count) if "R" in name else (name,)


class Values:
    """What registers, the constant bank and shared memory of one lane hold; None is unknown. `found`: what it finds
    where it looks for a word of other programs."""

    def __init__(self, constants: dict[int, int], specials: dict[str, int], found: int | None = None) -> None:
        self.constants, self.specials, self.found = constants, specials, found
        self.registers: State = {}
        self.shared: dict[int, int | None] = {}

    def copy(self) -> Values:
        other = Values(self.constants, self.specials, self.found)
        other.registers, other.shared = dict(self.registers), dict(self.shared)
        return other

    def meet(self, other: Values) -> None:
        """Forget what is not the same in both."""
        for mine, theirs in ((self.registers, other.registers), (self.shared, other.shared)):
            for name in {*mine, *theirs}:
                if mine.get(name) != theirs.get(name):
                    mine[name] = None

    def get(self, name: str) -> int | None:
        return ALWAYS[name] if name in ALWAYS else self.registers.get(name)

    def predicate(self, text: str) -> bool | None:
        """P0, !P0, PT."""
        value = self.get(text.lstrip("!"))
        return None if value is None else bool(value) != text.startswith("!")

    def word(self, text: str) -> int | None:
        """A source of 32 bits."""
        return reader(text)(self)

    def pair(self, text: str) -> int | None:
        """A source of 64 bits, by its lower word."""
        if constant := CONSTANT.match(text):
            at = int(constant[2], 16)
            words = [self.constants.get(at), self.constants.get(at + 4)]
        elif "Z" in text or NUMBER.match(text):
            return (self.word(text) or 0) & MASK
        else:
            words = [self.get(name) for name in neighbours(text.lstrip("-~"), 2)]
        low, high = words
        return None if low is None or high is None else high << 32 | low

    def address(self, text: str) -> int | None:
        """[R44+UR4+0x1000]"""
        inside = ADDRESS.search(text)
        parts = [self.word(p.partition(".")[0]) for p in inside[1].replace("-", "+-").split("+") if p] if inside else []
        return None if not parts or None in parts else sum(p for p in parts if p is not None) & MASK


@functools.cache
def reader(text: str) -> Callable[[Values], int | None]:
    """What reads a source of 32 bits: a register with its sign, a number, a constant. -x is ~x + 1, with its carry."""
    bare = text.lstrip("-~|").rstrip("|")
    read = _reader(bare)
    if bare == text:
        return read
    sign = _SIGNS[text[0]]
    return lambda values: None if (value := read(values)) is None else sign(value)


_SIGNS: dict[str, Callable[[int], int]] = {
    "-": lambda value: (value ^ MASK) + 1,
    "~": lambda value: value ^ MASK,
    "|": lambda value: value if value < 1 << 31 else -value & MASK,
}


def _reader(text: str) -> Callable[[Values], int | None]:
    if NUMBER.match(text):
        number = int(text, 0) & MASK
        return lambda values: number
    if constant := CONSTANT.match(text):
        at = int(constant[2], 16) if int(constant[1], 16) == 0 else -1
        return lambda values: values.constants.get(at)
    if text in ALWAYS:
        fixed = ALWAYS[text]
        return lambda values: fixed
    if text.startswith("SR"):
        return lambda values: values.specials.get(text)
    return lambda values: values.registers.get(text)
