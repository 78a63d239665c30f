"""A rule for each integer instruction that loops and branches are decided by; all others give unknown results.

A rule reads the sources of one instruction, and returns words. Reading one that is not known ends it (Unknown).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from . import arithmetic as a
from .operands import Operands, Values, operands_of, reader
from .pipes import width
from .sass import Instruction

MASK = a.MASK
Results = Sequence[int | None]


class Unknown(Exception):
    """A source whose value is data."""


class Sources:
    """The sources of one instruction: by place, as what the rule takes them for. Reading an unknown one raises."""

    values: Values

    def __init__(self, found: Operands, modifiers: Sequence[str]) -> None:
        self.found, self.modifiers, self.texts = found, modifiers, found.sources
        self.words = [reader(text) for text in self.texts]

    def __len__(self) -> int:
        return len(self.texts)

    def word(self, at: int) -> int:
        return _known(self.words[at](self.values)) & MASK

    def carrying(self, at: int) -> int:
        """With the carry of -x, which is ~x + 1."""
        return _known(self.words[at](self.values))

    def pair(self, at: int) -> int:
        return _known(self.values.pair(self.texts[at]))

    def signed(self, at: int) -> int:
        return self.word(at) if "U32" in self.modifiers else a.signed(self.word(at))

    def predicate(self, at: int) -> bool:
        value = self.values.predicate(self.texts[at])
        return bool(_known(None if value is None else int(value)))

    def address(self, at: int) -> int:
        return _known(self.values.address(self.texts[at]))


def _known(value: int | None) -> int:
    if value is None:
        raise Unknown
    return value


def _with_carries(s: Sources, total: int) -> Results:
    """Carries for as many predicates as the instruction has, then the word."""
    carries = [int(total >> 32 > i) for i in range(len(s.found.predicates))]
    return (*carries, total & MASK)


def _add(s: Sources) -> Results:
    words = [i for i, text in enumerate(s.texts) if not a_predicate(text)]
    carried = sum(s.predicate(i) for i, text in enumerate(s.texts) if a_predicate(text)) if "X" in s.modifiers else 0
    if "64" in s.modifiers:
        return _split(sum(s.pair(i) for i in words))
    return _with_carries(s, sum(s.carrying(i) for i in words) + carried)


def a_predicate(text: str) -> bool:
    return text.lstrip("!U").startswith("P")


def _split(value: int) -> Results:
    return (value & MASK, value >> 32 & MASK)


def _multiply_add(s: Sources) -> Results:
    if "MOV" in s.modifiers:
        return (s.word(2),)
    product = s.signed(0) * s.signed(1)
    if "WIDE" in s.modifiers:
        total = (product & (1 << 64) - 1) + s.pair(2)
        return (*(int(total >> 64) for _ in s.found.predicates), *_split(total))
    if "HI" in s.modifiers:
        return ((product + s.pair(2)) >> 32 & MASK,)
    carried = s.predicate(3) if "X" in s.modifiers and len(s) > 3 else 0
    return _with_carries(s, (product & MASK) + s.word(2) + carried)


def _logic(s: Sources) -> Results:
    result = a.table_of_three(s.word(0), s.word(1), s.word(2), s.word(3))
    return (*(int(result != 0) for _ in s.found.predicates), result)


def _predicate_logic(s: Sources) -> Results:
    row = s.predicate(0) << 2 | s.predicate(1) << 1 | s.predicate(2)
    return tuple(s.word(at) >> row & 1 for at in (3, 4))


def _compare(s: Sources) -> Results:
    lower = s.predicate(3) if "EX" in s.modifiers else None
    found = a.compare(s.modifiers, s.word(0), s.word(1), lower)
    combine = next(a.COMBINATIONS[m] for m in s.modifiers if m in a.COMBINATIONS)
    return (int(combine(found, s.predicate(2))), int(combine(not found, s.predicate(2))))


def _shift(s: Sources) -> Results:
    low, amount, high = s.word(0), s.word(1), s.word(2)
    if "L" in s.modifiers:
        return (a.shifted_left(low, amount, high, "HI" in s.modifiers),)
    return (a.shifted_right(low, amount, high, s.modifiers),)


def _scaled_add(s: Sources) -> Results:
    """LEA: (a << n) + b; with .HI what leaves the word upwards, of the pair (a, c)."""
    places = [i for i, text in enumerate(s.texts) if not a_predicate(text)]
    carried = s.predicate(len(s) - 1) if "X" in s.modifiers else 0
    shift = s.word(places[-1])
    if "HI" not in s.modifiers:
        return _with_carries(s, (s.word(0) << shift & MASK) + s.carrying(1) + carried)
    upper = a.signed(s.word(0)) >> 32 if "SX32" in s.modifiers else s.word(2)
    both = (upper << 32 | s.word(0)) << shift
    return _with_carries(s, (both >> 32 & MASK) + s.carrying(1) + carried)


def _choose(s: Sources) -> Results:
    return (s.word(0 if s.predicate(2) else 1),)


def _least(s: Sources) -> Results:
    last = len(s) - 1
    numbers = [s.signed(at) for at in range(last)]
    return ((min if s.predicate(last) else max)(numbers) & MASK,)


def _least_of_sum(s: Sources) -> Results:
    total = s.word(0) + s.word(1) & MASK
    first = total if "U32" in s.modifiers else a.signed(total)
    return ((min if s.predicate(3) else max)(first, s.signed(2)) & MASK,)


def _constant(s: Sources) -> Results:
    return _split(s.pair(0)) if "64" in s.modifiers else (s.word(0),)


def _to_float(s: Sources) -> Results:
    value = s.word(0) if "U32" in s.modifiers else a.signed(s.word(0))
    return (a.to_float_bits(float(value)),)


def _to_integer(s: Sources) -> Results:
    return (int(a.from_float_bits(s.word(0))) & MASK,)


def _reciprocal(s: Sources) -> Results:
    if "RCP" not in s.modifiers:
        raise Unknown
    return (a.to_float_bits(1 / a.from_float_bits(s.word(0))),)


def _load_shared(s: Sources) -> Results:
    return tuple(s.values.shared.get(s.address(0) + 4 * i) for i in range(len(s.found.words)))


def _each(s: Sources) -> Results:
    return tuple(s.word(at) for at in range(len(s.found.words)))


def _look(s: Sources) -> Results:
    return [s.values.found if "STRONG" in s.modifiers else None] * len(s.found.words)


def _halves(s: Sources) -> Results:
    """HFMA2 of zeros: two halves that are written as numbers, the upper one first."""
    if s.texts[:2] != ("-RZ", "RZ"):
        raise Unknown
    return (int.from_bytes(struct.pack("<ee", float(s.texts[3]), float(s.texts[2])), "little"),)


def _pack(s: Sources) -> Results:
    """P2R: predicates, by their numbers, as bits of a word."""
    mask, base = s.word(len(s) - 1), s.word(len(s) - 2)
    names = s.texts[:-2]
    return (base & ~mask | sum(s.predicate(i) << int(name[1:]) for i, name in enumerate(names)),)


def _unpack(s: Sources) -> Results:
    return tuple(s.word(0) >> int(name[1:]) & 1 for name in s.found.predicates)


RULES: dict[str, Callable[[Sources], Results]] = {
    "IADD3": _add, "IADD": _add, "VIADD": _add, "IMAD": _multiply_add, "LOP3": _logic, "PLOP3": _predicate_logic,
    "ISETP": _compare, "SHF": _shift, "LEA": _scaled_add, "SEL": _choose, "IMNMX": _least, "VIMNMX": _least,
    "VIADDMNMX": _least_of_sum, "LDC": _constant, "LDCU": _constant, "I2F": _to_float, "I2FP": _to_float,
    "F2I": _to_integer, "HFMA2": _halves, "P2R": _pack, "R2P": _unpack, "MUFU": _reciprocal, "LDS": _load_shared,
    "MOV": lambda s: (s.word(0),), "R2UR": lambda s: (s.word(0),), "S2R": lambda s: (s.word(0),),
    "IABS": lambda s: (abs(a.signed(s.word(0))) & MASK,), "CS2R": lambda s: (0, 0),
    "PRMT": lambda s: (a.permuted(s.word(0), s.word(1), s.word(2)),),
    "SHFL": lambda s: (1, s.word(0)), "VOTE": lambda s: (1,), "POPC": lambda s: (s.word(0).bit_count(),),
    "FLO": lambda s: (s.word(0).bit_length() - 1 & MASK,), "ATOMG": lambda s: (1, 0), "ATOM": lambda s: (1, 0),
    "SYNCS": lambda s: (1,), "ELECT": lambda s: (1, 0), "LDG": _look, "STL": _each, "LDL": _each,
}  # fmt: skip
"""An atomic operation finds zero: the program is the first to arrive, and leaves the finish to the last one. One that
adds nothing is a load that sees what others store: it finds what `Values` are told. A vote is that of one lane; a
shuffle gives the lane's own word, which is right where all lanes hold the same. A tile that is waited for is there, and
the lane is the one of its warp that asks for the next."""
ALIASES = {"USEL": "SEL", "UMOV": "MOV", "ULDC": "LDC", "S2UR": "S2R", "VOTEU": "VOTE"}


def rule_of(instruction: Instruction) -> Callable[[Sources], Results] | None:
    """How the results are computed; None where they are unknown."""
    base = ALIASES.get(instruction.base, instruction.base)
    return RULES.get(base) or RULES.get(base.removeprefix("U"))


def has_rule(instruction: Instruction) -> bool:
    """Whether what it writes may be known."""
    return instruction.base == "STS" or rule_of(instruction) is not None


class Step:
    """One instruction, made ready to be executed many times."""

    def __init__(self, instruction: Instruction) -> None:
        self.guard, self.instruction = instruction.guard, instruction
        self.found = operands_of(instruction)
        self.results, self.stores = self.found.results, instruction.base == "STS"
        self.rule = rule_of(instruction)
        self.sources = Sources(self.found, instruction.op.split(".")[1:])

    def execute(self, values: Values) -> None:
        """Write the results; what no rule computes, or what hangs on something unknown, becomes unknown."""
        runs = values.predicate(self.guard) if self.guard else True
        if runs is False:
            return
        if self.stores:
            _store(self.instruction, values)
            return
        results = self._results(values) or [None] * len(self.results)
        for name, value in zip(self.results, results, strict=False):
            values.registers[name] = value if runs or values.get(name) == value else None

    def _results(self, values: Values) -> Results | None:
        self.sources.values = values
        try:
            return self.rule(self.sources) if self.rule else None
        except (Unknown, IndexError, StopIteration, OverflowError, ZeroDivisionError, ValueError):
            return None


def _store(instruction: Instruction, values: Values) -> None:
    """STS: what shared memory holds where the address is known; everything is unknown where it is not."""
    at = values.address(instruction.operands[0])
    if at is None:
        values.shared.clear()
        return
    for i in range(max(1, width(instruction) // 4)):
        values.shared[at + 4 * i] = values.word(instruction.operands[1]) if i == 0 else None
