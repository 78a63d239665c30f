"""Values that backward makes again and compares with what forward made of them: they are handed over, bit for bit.

    hardest = d.amax(1); backward: where(d == hardest, ..)   ->   forward hands d over too

A kernel that makes d again may add in another order, and the largest of a row would be none of its elements. So it is
of all that adds: products, sums, running sums. What is made of these element by element has the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...evaluate import element
from ...graph import Graph, Value
from ...prims import COMPARE, PRIMS
from ...program import Program
from ...rewrite import number_of
from .recompute import Choice, hidden_values, made_in_forward, present, saved_by_user, value_at, with_choice

ADDS = ("sum", "prod", "cumsum", "dot", "scan", "scatter")
"""Primitives whose bits depend on the order in which something is added."""
SELECTS = ("amax", "amin", "argmax", "argmin", "gather", "aten", "call")
"""Primitives of which one result is one of the elements: what is compared with it may be equal to it."""
CHOOSES = {"max": 2, "min": 2, "where": 1}
"""The same, element by element, and of how many operands first: of two sums, or by a condition on one."""
STEPS = (*COMPARE, "sign", "floor", "ceil", "round", "trunc", "floordiv", "rem", "fmod")
"""Primitives that jump: where two numbers are equal, a unit of one of them may decide."""
TRIALS = 8
UNIT = 1e-9
"""What counts as a unit of numbers near one."""


class Pair(NamedTuple):
    """Values of forward that are equal in some places: one that backward makes again, one that it is handed."""

    made: Value
    handed: Value


@dataclass(frozen=True)
class Compared:
    """Program -> the same program, which hands over what is compared; itself, where nothing is."""

    def __call__(self, program: Program) -> Program:
        users, captured = saved_by_user(program), hidden_values(program)
        found = dict.fromkeys(pair.made for pair in pairs_of(program) if pair.made.id not in users)
        if not set(found) - set(captured):
            return program
        saved = tuple(dict.fromkeys([*captured, *found]))
        return with_choice(program, Choice(program, saved, rows=tuple(found)))


def pairs_of(program: Program) -> list[Pair]:
    """What the backwards of a program make again, and compare with what they are handed."""
    added = added_in(program.forward)
    return [pair for b in program.backward.values() for pair in _Handed(program, b, added).pairs()]


def added_in(graph: Graph) -> frozenset[int]:
    """Ids of what a graph adds floats to, and of all that is made of it."""
    return made_of(graph, {v.id for v in graph.order() if v.prim in ADDS and v.avals[0].is_float})


def made_of(graph: Graph, values: Collection[int]) -> frozenset[int]:
    """Ids of some values, and of all that is made of them."""
    made = set(values)
    for value in graph.order():
        made |= {value.id} if any(a.id in made for a in value.args) else set()
    return frozenset(made)


def hands_over_selected(program: Program) -> bool:
    """True where backward is handed what forward has selected among sums, the largest of some products say."""
    added = added_in(program.forward)
    selected = {v.id for v in program.forward.order() if _selects(v, added)}
    kept = (value_at(program, place) for place in present(program))
    return not made_of(program.forward, selected).isdisjoint(v.id for v in kept if v is not None)


def _selects(value: Value, added: Collection[int]) -> bool:
    if value.prim in SELECTS:
        return any(a.id in added for a in value.args)
    return value.prim in CHOOSES and all(a.id in added for a in value.args[: CHOOSES[value.prim]])


# ---------------------------------------------------------------------------------------------------- in a backward
class _Handed:
    """A backward, by what it is handed and what it makes again. added: values of forward, by their ids."""

    def __init__(self, program: Program, backward: Graph, added: Collection[int]) -> None:
        self.backward, self.added = backward, added
        self.values = made_in_forward(program, backward)
        inputs = {v.id for v in backward.inputs if self._is_added(v)}
        self.inputs, self.handed = inputs, made_of(backward, inputs)

    def pairs(self) -> Iterator[Pair]:
        for value in self.backward.order():
            if value.prim in STEPS and value.id in self.handed:
                made, handed = self._ends(value)
                if made and handed and jumps(value, {v.id for v in made}, {v.id for v in handed}):
                    yield from (Pair(self.values[m.id], self.values[h.id]) for m in made for h in handed)

    def _ends(self, value: Value) -> tuple[list[Value], list[Value]]:
        """What an element of a value is made of: values made again, and values that are handed over."""
        made, handed = dict[Value, None](), dict[Value, None]()
        todo = list(value.args)
        while todo:
            operand = todo.pop()
            if operand.id not in self.handed and self._is_added(operand):
                made[_below_layout(operand)] = None
            elif operand.id in self.inputs:
                handed[operand] = None
            elif _is_by_element(operand):
                todo += operand.args
            elif operand.id in self.handed and self._is_added(operand):  # selected of what is handed over, say
                handed[operand] = None
        return [v for v in made if self._is_added(v)], list(handed)

    def _is_added(self, value: Value) -> bool:
        known = self.values.get(value.id)
        return known is not None and known.id in self.added


def _is_by_element(value: Value) -> bool:
    return PRIMS[value.prim].family in ("elementwise", "layout")


def _below_layout(value: Value) -> Value:
    """What a row repeats, and what is compared in more digits than it has; a tile is itself."""
    while value.prim in ("broadcast", "reshape", "cast"):
        (value,) = value.args
    return value


# ------------------------------------------------------------------------------------------------------ in numbers
def jumps(step: Value, made: Collection[int], handed: Collection[int]) -> bool:
    """True where one unit of what is made again changes a step, though it is equal to what is handed over.

    d == largest   does;   exp(d - total) > 0.1   does not, nor does   far - d + margin > 0

    Asked in numbers: other operands are drawn, the same ones at each asking.
    """
    ways = [{float(_Drawn(made, handed, unit, seed).number(step)) for unit in (-1, 0, 1)} for seed in range(TRIALS)]
    return any(len(results) > 1 for results in ways)


class _Drawn:
    """Single numbers in the place of values. unit: by how many units what is made again is more."""

    def __init__(self, made: Collection[int], handed: Collection[int], unit: int, seed: int) -> None:
        self.made, self.handed, self.unit, self.seed = made, handed, unit, seed
        self.known: dict[int, Any] = {}

    def number(self, value: Value) -> Any:
        if value.id not in self.known:
            self.known[value.id] = self._number(value)
        return self.known[value.id]

    def _number(self, value: Value) -> Any:
        if value.id in self.made:
            return self._drawn(value, 0) + self.unit * (UNIT if value.aval.is_float else 1)
        if value.id in self.handed:
            return self._drawn(value, 0)
        family = PRIMS[value.prim].family
        if family == "elementwise":
            return element(value, [self.number(a) for a in value.args])
        if family == "layout":
            return self.number(value.args[0])
        plain = number_of(value)
        return self._drawn(value, value.id) if plain is None else plain

    def _drawn(self, value: Value, which: int) -> Any:
        """A number of the type of a value, the same one for the same `which`."""
        random = np.random.default_rng((self.seed, which))
        drawn = random.uniform(0.5, 1.5)
        if value.aval.is_float:
            return drawn
        return drawn > 1 if value.dtype == "b1" else int(drawn * 4)
