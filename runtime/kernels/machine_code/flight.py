"""Bytes that a lane has asked memory for and not waited for yet: the most at a time, by the order of instructions.

A load into registers is waited for where one of them is read; loads come back in their order. A copy into shared memory
is waited for by DEPBAR, by groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from .flow import Block
from .operands import operands_of, registers_read
from .pipes import width
from .sass import Instruction

LEAST = 1 / 8
"""Of a lane's loaded bytes: blocks that load less are not what memory is busy with."""


class Flight:
    """Watches the blocks of a lane in the order in which it runs them."""

    def __init__(self) -> None:
        self.peaks: Counter[int] = Counter()  # by block
        self.loaded: dict[int, int] = {}
        self.loads: list[tuple[frozenset[str], int]] = []
        self.groups: list[int] = []
        self.group = 0

    def watch(self, block: Block) -> None:
        """The block is run."""
        self.loaded[block.at] = sum(width(i) for i in block.instructions if is_load(i))
        for instruction in block.instructions:
            self._step(instruction)
            pending = sum(size for _, size in self.loads) + sum(self.groups) + self.group
            self.peaks[block.at] = max(self.peaks[block.at], pending)

    def most(self, visits: Mapping[int, int]) -> int:
        """The most bytes on their way at a time, in the blocks through which most of a lane's loads go."""
        moved = {at: size * visits.get(at, 0) for at, size in self.loaded.items()}
        least = LEAST * sum(moved.values())
        return max((self.peaks[at] for at, size in moved.items() if size >= least), default=0)

    def _step(self, instruction: Instruction) -> None:
        if self.loads:
            self._wait(registers_read(instruction) | set(operands_of(instruction).results))
        if instruction.base == "LDGDEPBAR":
            self.groups, self.group = [*self.groups, self.group], 0
        elif instruction.base == "DEPBAR" and instruction.is_a("LE"):
            pending = int(instruction.operands[-1], 0)
            self.groups = self.groups[len(self.groups) - pending :] if pending else []
        elif is_load(instruction) and instruction.base == "LDG":
            self.loads.append((frozenset(operands_of(instruction).words), width(instruction)))
        elif is_load(instruction):
            self.group += width(instruction)

    def _wait(self, names: frozenset[str]) -> None:
        """What is read of a load has come, and what was asked for before it."""
        arrived = [i for i, (registers, _) in enumerate(self.loads) if registers & names]
        if arrived:
            self.loads = self.loads[arrived[-1] + 1 :]


def is_load(instruction: Instruction) -> bool:
    """Whether it asks device memory for bytes."""
    return instruction.base in ("LDG", "LDGSTS") and instruction.guard not in ("!PT", "!UPT")
