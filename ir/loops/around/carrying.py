"""A loop that carries more than it did: what is wanted of its steps once it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ...graph import Graph, Value, building, emit, provenance
from ...rewrite import copy_into, extract, nodes_between
from ..loop import Loop, loop_of

BESIDE = ("input", "elementwise", "layout", "source")
"""Families of what may be read beside the steps of a loop: it is made again in each of them."""


class Wanted(Protocol):
    """A node that is made of what a loop carries to its end."""

    @property
    def node(self) -> Value:
        """What is replaced."""

    @property
    def outside(self) -> Sequence[Value]:
        """What has to be there before the loop."""

    def carry(self, carrying: Carrying, env: Mapping[int, Any]) -> Callable[[], Value]:
        """Have it carried; how the node is made once the loop is over. `env`: values of the new graph, by id."""


class Carrying:
    """A loop under construction, within the graph that has its operands."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.body = loop, loop.body.copy()
        self.ends: list[Value] = []
        self.finals: list[Value] = []
        self.stacks: list[Value] = []
        self._given: list[Value] = []
        self._states: list[tuple[Value, Value, Value]] = []  # at first, before a step, after it
        self._xs: dict[Value, Value] = {}
        self._wholes: dict[Value, Value] = {}

    def result(self, number: int) -> Value:
        """What a step gives."""
        return Value(self.body, self.loop.results[number].id)

    def step_of(self, operand: Value) -> Value:
        """One step of an operand, within the body."""
        return self._input(self._xs, operand, operand.shape[1:], "step")

    def whole(self, operand: Value) -> Value:
        """An operand that is the same in all steps, within the body."""
        return self._input(self._wholes, operand, operand.shape, "whole")

    def _input(self, known: dict[Value, Value], operand: Value, shape: Sequence[Any], name: str) -> Value:
        if operand not in known:
            aval = replace(operand.aval, shape=tuple(shape))
            known[operand] = self.body.input(aval, f"{name}_of_{len(known)}")
        return known[operand]

    def carry(self, start: Value, update: Callable[[Value], Value]) -> int:
        """A further state, by what it is at first and what a step makes of it; its number among `ends`."""
        with building(self.body):
            before = self.body.input(start.aval, f"carried_{len(self._states)}")
            self._states.append((start, before, update(before)))
        return len(self._states) - 1

    def give(self, step: Value) -> int:
        """A further result of each step; its number among `stacks`."""
        self._given.append(step)
        return len(self._given) - 1

    def emit(self) -> list[Value]:
        """The results that the loop had, `finals` those that it carried; `ends` are what it carries besides, `stacks`
        what its steps give."""
        loop, body = self.loop, self.body
        carries, xs, wholes = ([Value(body, v.id) for v in kind] for kind in loop.inputs)
        results, count = [Value(body, o.id) for o in loop.results], len(loop.init)
        starts, before, after = zip(*self._states, strict=True) if self._states else ((), (), ())
        inputs = [*carries, *before, *xs, *self._xs.values(), *wholes, *self._wholes.values()]
        part = extract([*results[:count], *after, *results[count:], *self._given], inputs, name=body.name)
        init, operands = (*loop.init, *starts), ((*loop.xs, *self._xs), (*loop.wholes, *self._wholes))
        made = Loop(part, init, *operands, loop.length, loop.reverse).without_unread().emit()
        first, last = count + len(after), len(after) + len(results)
        self.finals, self.ends, self.stacks = made[:count], made[count:first], made[last:]
        return made[:count] + made[first:last]


def carried_along(graph: Graph, wanted: Mapping[int, Sequence[Wanted]]) -> Graph:
    """The graph with these made of what loops carry, by id of the loop."""
    return _Rebuilt(graph, wanted).graph() if any(wanted.values()) else graph


class _Rebuilt:
    """A copy of a graph under construction."""

    def __init__(self, source: Graph, wanted: Mapping[int, Sequence[Wanted]]) -> None:
        self.source, self.wanted, self.out = source, wanted, Graph(source.name)
        self.env: dict[int, Any] = {v.id: self.out.input_like(v) for v in source.inputs}
        self.made: dict[int, Callable[[], Value]] = {}

    def graph(self) -> Graph:
        source, env = self.source, self.env
        with building(self.out):
            for node in self._in_order():
                with provenance(node.origin):
                    env[node.id] = env[node.id] if node.id in env else self._node(node)
        self.out.mutations = {i: env[v.id] for i, v in source.mutations.items()}
        outputs = [None if o is None else env[o.id] for o in source.outputs]
        return self.out.returning(outputs, source.output_strides)

    def _in_order(self) -> Iterator[Value]:
        """The nodes, each when its operands are there; those that a loop carries once it has."""
        todo, of_loops = self.source.order(), {w.node.id for each in self.wanted.values() for w in each}
        while todo:
            later = list[Value]()
            for node in todo:
                is_ready = all(a.id in self.env for a in node.args)
                if is_ready and (node.id not in of_loops or node.id in self.made):
                    yield node
                else:
                    later.append(node)
            todo = later

    def _node(self, node: Value) -> Any:
        """A value, or the list of results of a loop that carries more."""
        if node.id in self.made:
            return self.made[node.id]()
        if self.wanted.get(node.id):
            return self._loop(node, self.wanted[node.id])
        args = [self.env[a.id] for a in node.args]
        if node.prim == "pick" and isinstance(args[0], list):
            return args[0][node.params["index"]]
        return emit(node.prim, *args, **node.params)

    def _loop(self, scan: Value, wanted: Sequence[Wanted]) -> list[Value]:
        copy_into(nodes_between([v for w in wanted for v in w.outside], self.env), self.env)
        carrying = Carrying(loop_of(scan, [self.env[a.id] for a in scan.args]))
        self.made |= {w.node.id: w.carry(carrying, self.env) for w in wanted}
        return carrying.emit()
