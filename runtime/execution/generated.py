"""The result of generating code for one graph: groups with their kernels, and the calls between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...codegen import Addition, Kernels
from ...ir.passes.clusters import UNBOUNDED, Bound
from ...ir.passes.fuse import Step
from ...ir.passes.place import Places
from ...ir.passes.products import Decision
from ...ir.passes.streaming.in_place import Overwrites
from ...ir.passes.streaming.slabs import Slabs
from ...ir.passes.streaming.streams import StreamDecision
from ...ir.types import Size


@dataclass(frozen=True)
class Generated:
    """A graph as steps in an order that runs, the kernels of its groups by step, and why nodes were left to torch.

    refused: the same by node. products: what became of each product that has neighbours to be fused with, and of each
    region of products that need not be in memory, and of additions of a loop's steps. places: where in concatenations
    calls write their results. slabs: the groups that are walked in slabs, by step; over: which results take the memory
    of what they are made of. held: bytes of products and regions that are in memory as a whole, at these sizes.
    bound: what a group may keep waiting.
    """

    steps: list[Step]
    names: list[str]
    kernels: dict[int, Kernels]
    reasons: list[str]
    refused: Mapping[int, str] = field(default_factory=dict)
    products: Sequence[Decision | StreamDecision | Addition] = ()
    places: Places = field(default_factory=Places)
    slabs: Mapping[int, Slabs] = field(default_factory=dict)
    over: Overwrites = field(default_factory=dict)
    held: Sequence[Size] = ()
    bound: Bound = UNBOUNDED
