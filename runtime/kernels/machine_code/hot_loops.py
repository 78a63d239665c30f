"""The innermost loops around products of the tensor cores: what a turn issues, and how much it multiplies.

Read off the text of the machine code alone, nothing is followed: it says as much of kernels whose loops hang on data or
wait for descriptors (TMA). No time is in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import networkx as nx

from .counts import _flow
from .flow import END, Flow
from .sass import Instruction

SHAPE = re.compile(r"\d+x\d+x\d+")
OF_WARPS = {"HGMMA": 4, "QGMMA": 4, "IGMMA": 4, "BGMMA": 4}
"""Warps that share one product, for which each issues the instruction."""
PACKED = {"1688": (16, 8, 8), "16816": (16, 8, 16), "16832": (16, 8, 32), "884": (8, 8, 4), "848": (8, 4, 8)}
"""Sizes that are written without signs between them."""


@dataclass(frozen=True)
class HotLoop:
    """A loop at byte `at`: what a warp issues in a turn, and its share of the multiply-adds of the tensor cores."""

    at: int
    instructions: int
    multiplied: float


def hot_loops(cubin: bytes, kernel: str = "a kernel") -> tuple[HotLoop, ...]:
    """By address. Blocks that a turn may pass over count, but for slow paths. Raises NoListingError."""
    flow, _ = _flow(cubin, kernel)
    loops = [loop for loop in _loops(flow) if any(map(_multiplied, loop.issued(flow)))]
    innermost = [loop for loop in loops if not any(other.blocks < loop.blocks for other in loops)]
    return tuple(sorted((_hot(flow, loop) for loop in innermost), key=lambda loop: loop.at))


def _hot(flow: Flow, loop: Loop) -> HotLoop:
    issued = list(loop.issued(flow))
    return HotLoop(min(loop.blocks), sum(i.base != "NOP" for i in issued), sum(map(_multiplied, issued)))


class Loop(NamedTuple):
    """The blocks of a loop by their addresses, and those of them that each turn runs."""

    blocks: frozenset[int]
    always: frozenset[int]

    def issued(self, flow: Flow) -> Iterator[Instruction]:
        """What a turn issues, that goes nowhere out of line unless each turn does."""
        ours = (flow.blocks[at] for at in sorted(self.blocks))
        return (i for block in ours if block.at in self.always or not block.is_out_of_line for i in block.instructions)


def _loops(flow: Flow) -> Iterator[Loop]:
    """Natural loops: the blocks on the ways to each branch back to a block that is on all ways to that branch."""
    edges = nx.DiGraph((b.at, to) for b in flow.blocks.values() for to in b.successors() if to != END)
    edges.add_node(flow.entry)
    above = nx.immediate_dominators(edges, flow.entry)
    heads: dict[int, set[int]] = {}
    for at, to in edges.edges:
        if at in above and to in _chain(above, at):
            heads.setdefault(to, set()).add(at)
    for head, ends in heads.items():
        within = edges.reverse(copy=False).subgraph(set(edges) - {head})
        before = (nx.descendants(within, end) | {end} for end in ends - {head})
        blocks = frozenset({head}.union(*before) & set(above))
        always = frozenset.intersection(*(frozenset(_chain(above, end)) for end in ends))
        yield Loop(blocks, blocks & always)


def _chain(above: dict[int, int], at: int) -> Iterator[int]:
    """A block, and those that are on all ways to it."""
    yield at
    while above.get(at, at) not in (at, None):
        at = above[at]
        yield at


def _multiplied(instruction: Instruction) -> float:
    """Multiply-adds of one product, for a warp; 0 of any other instruction."""
    if not instruction.base.endswith("MMA"):
        return 0.0
    for word in instruction.op.split(".")[1:]:
        sizes = tuple(map(int, word.split("x"))) if SHAPE.fullmatch(word) else PACKED.get(word)
        if sizes:
            return math.prod(sizes) / OF_WARPS.get(instruction.base, 1)
    return 0.0
