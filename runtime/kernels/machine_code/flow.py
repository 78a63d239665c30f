"""The control flow of machine code: basic blocks, where two sides of a branch meet again, and slow paths."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx

from .operands import SPILLED
from .sass import Instruction, Listing

BRANCHES, ENDS = ("BRA", "BRX", "JMP"), ("EXIT", "RET", "BPT", "KILL")
OUT_OF_LINE, OWN_MEMORY = ("CALL", "BPT", "NANOSLEEP"), ("LDL", "STL")
"""What a slow path is known by: it calls a routine, or looks numbers up in the memory of its thread."""
END = -1


@dataclass(frozen=True)
class Block:
    """Instructions that run one after the other. `follows`: the address behind them, END where there is none."""

    at: int
    instructions: Listing
    follows: int

    @property
    def last(self) -> Instruction:
        return self.instructions[-1]

    @functools.cached_property
    def is_out_of_line(self) -> bool:
        return any(i.base in OUT_OF_LINE or _looks_up(i) for i in self.instructions)

    @property
    def aborts(self) -> bool:
        """Whether the launch ends there: by a trap, or by the call of an assertion, whose address is in a register."""
        return self.last.base == "BPT" or (self.last.base == "CALL" and self.last.target is None)

    def successors(self) -> Iterator[int]:
        """Addresses that control may go to next; a call returns."""
        last = self.last
        if last.base in BRANCHES and last.target is not None:
            yield last.target
        if last.base in ENDS or self.aborts:
            yield END
        if not self.aborts and (last.base not in (*BRANCHES, *ENDS) or is_conditional(last)):
            yield self.follows


def _looks_up(instruction: Instruction) -> bool:
    """Whether it finds a place in the memory of its thread; a spilled register has one for good."""
    return instruction.base in OWN_MEMORY and not any(map(SPILLED.fullmatch, instruction.operands))


def is_conditional(branch: Instruction) -> bool:
    """Whether a branch or an exit has a condition: a guard, or a predicate among its operands."""
    return branch.guard not in ("", "PT") or branch.is_a("DIV") or any("P" in o for o in branch.operands)


class Flow:
    """The blocks of a listing by address."""

    def __init__(self, listing: Listing) -> None:
        self.blocks = {block.at: block for block in _blocks(listing)}
        self.entry = listing[0].at

    @functools.cached_property
    def meets(self) -> dict[int, int]:
        """Block -> the first block on all ways from it that do not abort (its immediate postdominator)."""
        edges, lost = nx.DiGraph(), self._lost()
        edges.add_nodes_from([*self.blocks, END])
        edges.add_edges_from((to, b.at) for b in self.blocks.values() for to in b.successors() if to not in lost)
        return dict(nx.immediate_dominators(edges, END))

    def _lost(self) -> set[int]:
        """Blocks from which every way aborts."""
        lost, size = {block.at for block in self.blocks.values() if block.aborts}, -1
        while len(lost) > size:
            size = len(lost)
            lost |= {block.at for block in self.blocks.values() if set(block.successors()) <= lost}
        return lost

    def between(self, side: int, meet: int) -> set[int]:
        """The blocks on the ways from `side` to `meet`."""
        seen, waiting = set[int](), [side]
        while waiting:
            at = waiting.pop()
            if at not in seen and at not in (meet, END):
                seen.add(at)
                waiting += self.blocks[at].successors()
        return seen

    def is_slow(self, side: int, meet: int) -> bool:
        """Whether all ways from `side` lead out of line before they are back at `meet`: a loop that divides is not."""
        seen, waiting = set[int](), [side]
        while waiting:
            at = waiting.pop()
            if at in (meet, END):
                return False
            if at not in seen and not self.blocks[at].is_out_of_line:
                seen.add(at)
                waiting += self.blocks[at].successors()
        return True


def _blocks(listing: Listing) -> Iterator[Block]:
    starts = {listing[0].at, *(i.target for i in listing if i.target is not None)}
    part: list[Instruction] = []
    for instruction, after in zip(listing, [*listing[1:], None], strict=True):
        part.append(instruction)
        ends = instruction.base in (*BRANCHES, *ENDS, "CALL")
        if after is None or ends or after.at in starts:
            yield Block(part[0].at, tuple(part), END if after is None else after.at)
            part = []
