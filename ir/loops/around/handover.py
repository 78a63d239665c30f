"""What the steps of a loop hand to those of another: as little as a minimum cut of its body allows, by bytes.

    y[t] = f(h, x[t]);  z[t] = y[t] * x[t]      and a loop that reads x, y and z      is handed y, and makes z again

As between forward and backward: what is computed from what the other loop reads anyway is not in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...graph import Graph, Value, building
from ...infer import sizes_equal
from ...passes.cost import estimate
from ...rewrite import copy_into, nodes_between
from ...switches import is_on
from ...types import Size, simplify_size
from ..loop import Loop, loop_of, rebuild_scans, scans_of
from ..parts import part_along
from ..prune import prune_scans
from ..tidy import in_bodies
from .cut import cheapest


@dataclass(frozen=True)
class Handover:
    """Graph -> an equal graph whose loops hand to one another what is cheapest."""

    def __call__(self, graph: Graph) -> Graph:
        if not is_on("handover") or not scans_of(graph):
            return graph
        graph = in_bodies(graph, self)
        while (pair := next(_pairs(graph), None)) is not None:
            graph = prune_scans(rebuild_scans(graph, pair.rebuilt))
        return graph


def _pairs(graph: Graph) -> Iterator[_Pair]:
    """Loops, and those that they hand more than they need to."""
    for second in scans_of(graph):
        steps = [step for x in loop_of(second).xs if (step := _Steps.of(x)).is_result]
        firsts = dict.fromkeys((step.source.args[0], step.start) for step in steps)
        yield from (p for p in (_Pair(first, second, start) for first, start in firsts) if p.wins)


class _Steps(NamedTuple):
    """What a loop reads step by step: a value from one of its places on."""

    source: Value
    start: Size

    @staticmethod
    def of(x: Value) -> _Steps:
        if x.prim != "slice":
            return _Steps(x, 0)
        params, whole = x.params, x.args[0].shape
        starts, stops, strides = (params[p] for p in ("start", "stop", "step"))
        is_along_time = all(a == 0 for a in starts[1:]) and stops[1:] == whole[1:] and all(n == 1 for n in strides)
        return _Steps(x.args[0], starts[0]) if is_along_time else _Steps(x, 0)

    @property
    def is_result(self) -> bool:
        """Whether a loop gives it."""
        source = self.source
        return source.prim == "pick" and source.args[0].prim == "scan"


class _Pair:
    """A loop whose steps, from `start` on, hand something to those of another one."""

    def __init__(self, first: Value, second: Value, start: Size) -> None:
        self.first, self.second, self.start = first, second, start
        self.source, self.reader = loop_of(first), loop_of(second)
        self.count = len(self.source.init)
        self.results: list[Value] = []
        self.operands: Loop = self.source

    @cached_property
    def handed(self) -> dict[int, Value]:
        """By number among what the reader reads step by step: values of the source's body."""
        found = {i: self._given(_Steps.of(x)) for i, x in enumerate(self.reader.xs)}
        return {i: value for i, value in found.items() if value is not None}

    def _given(self, steps: _Steps) -> Value | None:
        """What a step of the source gives; None where it gives nothing of the kind."""
        if not steps.is_result or steps.source.args[0] != self.first:
            return None
        number: int = steps.source.params["index"]
        if number < self.count:
            return None
        value = self.source.results[number]
        if steps.start == self.start:
            return value
        # what the step before has made of a state is the state before this one
        states = self.source.results[: self.count]
        before = list(self.source.inputs.carries)
        is_before = not self.source.reverse and steps.start == simplify_size(self.start - 1) and value in states
        return before[states.index(value)] if is_before else None

    @cached_property
    def kept(self) -> set[Value]:
        """What the source's steps give to others as well."""
        live, results = self.first.graph.live(), set(self.first.graph.results)
        own = {self.reader.xs[i] for i in self.handed}

        def is_alone(value: Value) -> bool:
            """Whether the reader alone reads it, as a whole or from its first step on."""
            users = [u for u in value.users if u.id in live]
            is_read = all(value in own if u == self.second else u in own and is_alone(u) for u in users)
            return is_read and value not in results

        picks = [p for p in self.first.users if not is_alone(p)]
        return {self.source.results[p.params["index"]] for p in picks if p.params["index"] >= self.count}

    @cached_property
    def at_hand(self) -> dict[Value, int]:
        """Steps of the source's operands that the reader has as well, and their numbers there."""
        numbers = {_Steps.of(x): i for i, x in enumerate(self.reader.xs)}
        pairs = [(own, _Steps.of(x)) for own, x in zip(self.source.inputs.xs, self.source.xs, strict=True)]
        there = [(own, _Steps(source, simplify_size(start + self.start))) for own, (source, start) in pairs]
        return {own: numbers[steps] for own, steps in there if steps in numbers}

    # ------------------------------------------------------------------ the cut
    @property
    def wins(self) -> bool:
        """Fewer bytes are read and written."""
        before = sum(self._bytes(v) for v in dict.fromkeys(self.handed.values()))
        return sum(map(self._bytes, self.cut)) < before

    @cached_property
    def cut(self) -> list[Value]:
        """The cheapest values of the source's body from which the reader can make what it is handed."""
        at_hand = {*self.at_hand, *self.source.inputs.wholes}
        return cheapest(self.source.body, [*self.handed.values()], self._bytes, at_hand)

    def _bytes(self, value: Value) -> int:
        """Written once and read once, or only read where it is in memory anyway."""
        in_memory = value in self.kept or value in self.source.inputs.xs
        return estimate(value.aval.nbytes) * (1 if in_memory else 2)

    # ------------------------------------------------------------------ the new loops
    def rebuilt(self, node: Value, args: list[Value]) -> list[Value] | None:
        """The results of each of the two, of the source with what it hands over behind its own."""
        if node == self.first:
            self.operands = loop_of(node, args)
            self.results = self._giving(self.operands).emit()
            return self.results
        return self._reading(loop_of(node, args)).emit() if node == self.second else None

    @cached_property
    def _fresh(self) -> list[Value]:
        given = self.source.results[self.count :]
        return [v for v in self.cut if v not in given and v not in self.source.inputs.xs]

    def _giving(self, loop: Loop) -> Loop:
        operands = zip(loop.inputs[1:], (loop.xs, loop.wholes), strict=True)
        steps, same = (list(zip(v, o, strict=True)) for v, o in operands)
        return loop.part(range(self.count), steps, same, [*loop.results[self.count :], *self._fresh])

    def _operand(self, value: Value) -> Value:
        """All steps of a value that is handed over."""
        if value in self.source.inputs.xs:
            return self._from_start(self.operands.xs[self.source.inputs.xs.index(value)])
        given = [*self.source.results[self.count :], *self._fresh]
        return self._from_start(self.results[self.count + given.index(value)])

    def _from_start(self, steps: Value) -> Value:
        """The steps of the source that the reader has one for."""
        start, length = self.start, self.reader.length
        if start == 0 and sizes_equal(length, self.source.length):
            return steps
        return part_along(steps, 0, start, simplify_size(start + length))

    def _reading(self, loop: Loop) -> Loop:
        """The reader, which makes in each step what it was handed."""
        out, inputs = Graph(loop.body.name), loop.inputs
        own = {i: x for i, x in enumerate(inputs.xs) if i not in self.handed}
        again = [v for v in self.cut if v not in self.at_hand]
        env = _as_inputs(out, inputs.carries, "carry") | _as_inputs(out, own.values(), "step")
        made = _as_inputs(out, again, "again")
        env |= _as_inputs(out, inputs.wholes, "whole")
        made |= _as_inputs(out, self.source.inputs.wholes, "same")
        made |= {x.id: env[inputs.xs[i].id] for x, i in self.at_hand.items() if i in own}
        with building(out):
            copy_into(nodes_between(self.handed.values(), made), made)
            env |= {inputs.xs[i].id: made[v.id] for i, v in self.handed.items()}
            copy_into(loop.body.order(), env)
        body = out.returning([env[o.id] for o in loop.results])
        xs = (*(loop.xs[i] for i in own), *map(self._operand, again))
        wholes = (*loop.wholes, *self.operands.wholes)
        return Loop(body, loop.init, xs, wholes, loop.length, loop.reverse).without_unread()


def _as_inputs(out: Graph, values: Iterable[Value], name: str) -> dict[int, Value]:
    """New inputs like these values, by their ids."""
    return {v.id: out.input(v.aval, f"{name}_{n}") for n, v in enumerate(values)}
