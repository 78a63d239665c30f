"""What the steps of a loop hand to those of another: as little as a minimum cut of its body allows, by bytes.

    y[t] = f(h, x[t]);  z[t] = y[t] * x[t]      and a loop that reads x, y and z      is handed y, and makes z again

As between forward and backward: what is computed from what the other loop reads anyway is not in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ...graph import Graph, Value, building
from ...infer import sizes_equal
from ...passes.cost import estimate
from ...rewrite import copy_into, nodes_between
from ...switches import is_on
from ..loop import Loop, loop_of, rebuild_scans, scans_of
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
        xs = loop_of(second).xs
        firsts = dict.fromkeys(x.args[0] for x in xs if x.prim == "pick" and x.args[0].prim == "scan")
        pairs = (_Pair(first, second) for first in firsts)
        yield from (p for p in pairs if sizes_equal(p.source.length, p.reader.length) and p.wins)


class _Pair:
    """A loop whose steps hand something to those of another one of as many steps."""

    def __init__(self, first: Value, second: Value) -> None:
        self.first, self.second = first, second
        self.source, self.reader = loop_of(first), loop_of(second)
        self.count = len(self.source.init)
        self.results: list[Value] = []
        self.operands: Loop = self.source

    @cached_property
    def handed(self) -> dict[int, Value]:
        """By number among what the reader reads step by step: values of the source's body."""
        numbers = {i: x.params["index"] for i, x in enumerate(self.reader.xs) if self._is_given(x)}
        return {i: self.source.results[n] for i, n in numbers.items()}

    def _is_given(self, x: Value) -> bool:
        return x.prim == "pick" and x.args[0] == self.first and x.params["index"] >= self.count

    @cached_property
    def kept(self) -> set[Value]:
        """What the source's steps give to others as well."""
        live, results = self.first.graph.live(), set(self.first.graph.results)
        picks = [p for p in self.first.users if p in results or any(u.id in live and u != self.second for u in p.users)]
        return {self.source.results[p.params["index"]] for p in picks if p.params["index"] >= self.count}

    @cached_property
    def at_hand(self) -> dict[Value, int]:
        """Steps of the source's operands that the reader has as well, and their numbers there."""
        numbers = {x: i for i, x in enumerate(self.reader.xs)}
        pairs = zip(self.source.inputs.xs, self.source.xs, strict=True)
        return {own: numbers[x] for own, x in pairs if x in numbers}

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
            return self.operands.xs[self.source.inputs.xs.index(value)]
        given = [*self.source.results[self.count :], *self._fresh]
        return self.results[self.count + given.index(value)]

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
