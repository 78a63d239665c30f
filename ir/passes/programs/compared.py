"""Virtual values that backward compares with what forward made of them: they are handed over, bit for bit.

    hardest = d.amax(1); backward: where(d == hardest, ..)   ->   forward hands d over too

A kernel that makes d again adds in another order, and the largest of a row would be none of its elements. Such values
are in memory, as they are without kernels that stream them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from ...graph import Graph, Value
from ...prims import COMPARE
from ...program import Program
from ..cost import Hints
from ..virtual import virtual_values
from .recompute import Choice, hidden_values, made_in_forward, saved_by_user, with_choice


@dataclass(frozen=True)
class Compared:
    """Program -> the same program, which hands over what is compared; itself, where nothing is."""

    hints: Hints = field(default_factory=dict, hash=False)

    def __call__(self, program: Program) -> Program:
        virtual = virtual_values(program.forward, self.hints)
        if not virtual or not program.backward:
            return program
        tainted = made_of(program.forward, virtual)
        pairs = (pair for b in program.backward.values() for pair in _pairs(program, b, tainted))
        both = [pair for pair in pairs if all(v.id in tainted for v in pair)]
        users = saved_by_user(program)
        found = dict.fromkeys(v for pair in both for v in pair if v.id in virtual and v.id not in users)
        captured = hidden_values(program)
        if not set(found) - set(captured):
            return program
        saved = tuple(dict.fromkeys([*captured, *found]))
        return with_choice(program, Choice(program, saved, rows=tuple(found)))


def made_of(graph: Graph, values: Collection[int]) -> frozenset[int]:
    """Ids of some values, and of all that is made of them."""
    made = set(values)
    for value in graph.order():
        made |= {value.id} if any(a.id in made for a in value.args) else set()
    return frozenset(made)


def _pairs(program: Program, backward: Graph, tainted: Collection[int]) -> Iterator[tuple[Value, Value]]:
    """Two values of forward, floats, that backward compares, one of them made of what it is handed."""
    made = made_in_forward(program, backward)
    handed = made_of(backward, {v.id for v in backward.inputs if (f := made.get(v.id)) is not None and f.id in tainted})
    for value in backward.order():
        if value.prim in COMPARE and value.args[0].aval.is_float and any(a.id in handed for a in value.args):
            sources = [made.get(_below_layout(a).id) for a in value.args]
            yield from [(x, y) for x in sources[:1] for y in sources[1:] if x is not None and y is not None]


def _below_layout(value: Value) -> Value:
    """What a row repeats, and what is compared in more digits than it has; a tile is itself."""
    while value.prim in ("broadcast", "reshape", "cast"):
        (value,) = value.args
    return value
