"""What ends walks over virtual values: sums of them of which no virtual value is made, and parts of such sums.

    dk = ds.mT @ q;  dk[:r], dk[r:]      one kernel makes dk, and stores each part where it belongs, under a mask
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, field, replace

from ..ir import Value
from ..ir.passes.virtual import needed_for
from ..ir.prims import PRIMS
from .program.axes import Goal, Part
from .program.sizes import same


@dataclass
class Walks:
    """wholes: ids of such sums, and of what is made of them element by element; parts: their parts, by id.

    stages: of those that are stored, once they are known.
    """

    order: Sequence[Value]
    wholes: set[int]
    parts: dict[int, tuple[Value, Part]]
    stages: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(order: Sequence[Value], virtual: Container[int], cut: Container[int]) -> Walks:
        """Those among some nodes in order; what is cut is read from memory."""
        needed = {v.id for v in needed_for(order, [v for v in order if v.id in virtual])}
        found, above = set[int](), set[int]()
        for v in order:
            made = any(a.id in virtual or (a.id in found and a.id not in cut) for a in v.args)
            others = [a for a in v.args if a.id in above and a.id not in found]
            family = PRIMS[v.prim].family
            is_sum = family == "reduce" or (family == "contract" and any(a.id in virtual for a in v.args))
            is_made = family == "elementwise" or v.prim in ("permute", "reshape")
            if made and not others and v.id not in needed and (is_sum or is_made):
                found.add(v.id)
            elif v.id not in virtual and any(a.id in virtual or a.id in above for a in v.args):
                above.add(v.id)
        parts = {v.id: part for v in order if v.prim == "slice" and (part := _part(v, found)) is not None}
        return Walks(order, found, parts)

    @property
    def ends(self) -> set[int]:
        return self.wholes | self.parts.keys()

    def in_whole(self, goal: Goal) -> Goal:
        """A goal, as a part of what a walk makes where it is one."""
        if goal.node.id not in self.parts:
            return goal
        whole, part = self.parts[goal.node.id]
        return replace(goal, whole=whole, part=part)

    def parts_read(self, value: Value, results: Collection[Value]) -> list[Value]:
        """The parts that are read of a sum of which nothing else is; none where something is."""
        readers = [v for v in self.order if any(a.id == value.id for a in v.args)]
        if value.id not in self.wholes or value in results or not readers:
            return []
        if len(readers) == 1 and readers[0].id in self.wholes:
            return self.parts_read(readers[0], results)
        read = {a.id for v in self.order for a in v.args}
        return [v for v in readers if v.id in read] if all(v.id in self.parts for v in readers) else []


def _part(value: Value, wholes: Container[int]) -> tuple[Value, Part] | None:
    """The place of a slice in a whole, along the only dimension that it divides."""
    (x,) = value.args
    dims = [d for d, (n, m) in enumerate(zip(value.shape, x.shape, strict=True)) if not same(n, m)]
    if x.id not in wholes or len(dims) != 1 or set(value.params["step"]) != {1}:
        return None
    return x, Part(dims[0], value.params["start"][dims[0]], value.shape[dims[0]])
