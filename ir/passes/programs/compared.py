"""Values that backward makes again and compares with what forward made of them: they are handed over, bit for bit.

    hardest = d.amax(1); backward: where(d == hardest, ..)   ->   forward hands d over too

A kernel that makes d again may add in another order, and the largest of a row would be none of its elements. So it is
of all that adds: products, sums, running sums. What is made of these element by element has the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
        pairs = pairs_of(program)
        found = dict.fromkeys(pair.made for pair in pairs if pair.made.id not in users)
        is_known = all(pair.made.graph is program.forward for pair in pairs)  # spelt as in forward
        if not (is_known and set(found) - set(captured)):
            return program
        saved = tuple(dict.fromkeys([*captured, *found]))
        return with_choice(program, Choice(program, saved, rows=tuple(found)))


def pairs_of(program: Program) -> list[Pair]:
    """What the backwards of a program make again, and compare with what they are handed."""
    return [pair for b in program.backward.values() for pair in _OfProgram(program, b).pairs()]


def pairs_alone(backward: Graph, given: int) -> list[Pair]:
    """The same of a backward whose forward runs as it was written. given: how many inputs are no gradients."""
    return list(_Alone(backward, given).pairs())


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
class _Backward:
    """A backward: what of it is made without its gradients, and of what sums. given: its inputs before gradients."""

    def __init__(self, backward: Graph, given: Sequence[Value]) -> None:
        self.backward, self.sums = backward, added_in(backward)
        self.free = _made_of_alone(backward, {v.id for v in given})

    def _is_sum(self, value: Value) -> bool:
        return value.id in self.free and value.id in self.sums

    def pairs(self) -> Iterator[Pair]:
        for value in self.backward.order():
            if value.prim in STEPS:
                made, handed = self._ends(value.args)
                if made and handed and self._may_decide(value, made, handed):
                    yield from (Pair(self._named(m), self._named(h)) for m in made for h in handed)

    def _may_decide(self, step: Value, made: Sequence[Value], handed: Sequence[Value]) -> bool:
        """True where the last digit of what is made again may decide a step."""
        return jumps(step, {v.id for v in made}, {v.id for v in handed})

    def _ends(self, values: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """What an element of some values is made of: values made again, and values that are handed over."""
        made, handed = dict[Value, None](), dict[Value, None]()
        todo = list(values)
        while todo:
            operand = todo.pop()
            if (again := self._made(operand)) is not None:
                made[again] = None
            elif self._is_handed(operand):
                handed[operand] = None
            elif _is_by_element(operand):
                todo += operand.args
        return list(made), list(handed)

    def _named(self, value: Value) -> Value:
        return value

    def _made(self, value: Value) -> Value | None:
        """The value that is made again, where it ends at this operand."""
        raise NotImplementedError

    def _is_handed(self, value: Value) -> bool:
        raise NotImplementedError


class _OfProgram(_Backward):
    """A backward beside its forward: known is what was selected or made of sums, and what is made again as it was."""

    def __init__(self, program: Program, backward: Graph) -> None:
        super().__init__(backward, backward.inputs[: len(present(program))])
        self.values, self.added = made_in_forward(program, backward), added_in(program.forward)
        self.inputs = {v.id for v in backward.inputs if self._is_added(v)}
        self.of_inputs = made_of(backward, self.inputs)

    def _is_added(self, value: Value) -> bool:
        known = self.values.get(value.id)
        return self._is_sum(value) if known is None else known.id in self.added

    def _made(self, value: Value) -> Value | None:
        below = _below_layout(value)
        return below if value.id not in self.of_inputs and self._is_added(value) and self._is_added(below) else None

    def _is_handed(self, value: Value) -> bool:
        """What it is given, or has selected of that."""
        is_end = value.id in self.inputs or not _is_by_element(value)
        return is_end and value.id in self.of_inputs and self._is_added(value)

    def _named(self, value: Value) -> Value:
        return self.values.get(value.id, value)


class _Alone(_Backward):
    """A backward whose forward is not known: whatever it is given may have been selected among what it makes again."""

    def __init__(self, backward: Graph, given: int) -> None:
        super().__init__(backward, backward.inputs[:given])
        self.given = {v.id for v in backward.inputs[:given] if v.aval.is_float}

    def _made(self, value: Value) -> Value | None:
        return value if not _is_by_element(value) and self._is_sum(value) else None

    def _is_handed(self, value: Value) -> bool:
        return value.id in self.given

    def _may_decide(self, step: Value, made: Sequence[Value], handed: Sequence[Value]) -> bool:
        """The same, or where the two sides may be equal by what forward did: x @ y / 4 == largest."""
        sides = [self._ends([a]) for a in step.args] if step.prim in COMPARE else []
        opposite = any(x[0] and y[1] for x, y in zip(sides, sides[::-1], strict=True))
        return opposite or super()._may_decide(step, made, handed)


def _made_of_alone(graph: Graph, values: Collection[int]) -> frozenset[int]:
    """Ids of some values, and of all that is made of nothing else."""
    made = set(values)
    for value in graph.order():
        made |= {value.id} if value.prim != "input" and all(a.id in made for a in value.args) else set()
    return frozenset(made)


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
