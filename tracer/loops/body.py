"""The body of a loop as a graph of its own, traced once; the values that it is given, hands on, and has stacked."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from .affine import ONE, Affine, Fit
from .description import Carried, Each, Items, Outside, Place, Read, Rolled, Run, Same, reads_in
from .floats import Formula
from .node import InnerLoop, like, values_of
from .program import Constant, Step, with_leaves
from .reasons import NotRolled
from .rolling import Located

Tensor = torch.Tensor
aten = torch.ops.aten


@dataclass
class Wanted:
    """What is read of the loops: the last values of some, all values of others; and what is read of the rest."""

    finals: set[Each] = field(default_factory=set)
    stacked: set[Each] = field(default_factory=set)
    outside: set[Outside] = field(default_factory=set)


def wanted_of(rolled: Rolled, located: Located) -> Wanted:
    """What the operands and results of a rolled trace read."""
    wanted = Wanted()
    operands = [o for step in rolled.outside for o in step] + list(rolled.results)
    operands += [o for body in rolled.bodies for step in body for o in step]
    for read in (r for operand in operands for r in reads_in(operand)):
        if not (isinstance(read, Read) and is_view(rolled, located, read.source)):
            _note(wanted, rolled, read)
    wanted.finals -= wanted.stacked - _carried_or_returned(rolled)
    return wanted


def _carried_or_returned(rolled: Rolled) -> set[Any]:
    """What is handed on has its last value without a stack; what is returned is no part of one."""
    returned = {r.source for operand in rolled.results for r in reads_in(operand) if isinstance(r, Read)}
    return returned | {Each(n, r.step, r.port) for n, body in enumerate(rolled.bodies) for r in _carried_in(body)}


def _carried_in(body: Sequence[Sequence[Any]]) -> Iterator[Carried]:
    return (r for step in body for o in step for r in reads_in(o) if isinstance(r, Carried))


def is_view(rolled: Rolled, located: Located, source: Any) -> bool:
    """True for a value of a loop that is a view of what the loop is given, not of what its steps make."""
    if not isinstance(source, Each) or source.port is not None:
        return False
    step, operands = located.steps[Place(source)], rolled.bodies[source.loop][source.step]
    if isinstance(step.target, InnerLoop) or not any(r.alias_info is not None for r in step.target._schema.returns):
        return False
    same = (Each(source.loop, o.step, o.port) for o in operands if isinstance(o, Same))
    others = (o for o in operands if not isinstance(o, Same))
    is_made_anew = any(isinstance(o, Carried | Formula | tuple) for o in others)
    return not is_made_anew and all(is_view(rolled, located, s) for s in same)


def _note(wanted: Wanted, rolled: Rolled, read: Any) -> None:
    source = read.source if isinstance(read, Read | Run) else None
    if isinstance(source, Outside):
        wanted.outside.add(source)
    if not isinstance(source, Each):
        return
    count = rolled.layout.counts(source.loop)
    is_last = isinstance(read, Read) and read.index == Affine(0, count.length, count.constant - 1)
    (wanted.finals if is_last else wanted.stacked).add(source)


@dataclass(frozen=True)
class Carry:
    """A value that is handed on: the result `of` the step before, or the carry number `older` of it.

    first: what the first step is given; None where no step reads it.
    """

    of: Same | None
    older: int | None
    first: Any


class Around(Protocol):
    """The trace around a loop: what is known of it, and the values that there are."""

    rolled: Rolled
    located: Located
    wanted: Wanted
    values: dict[int, Any]
    stacked: dict[Any, Tensor]

    def operand(self, operand: Any) -> Any:
        """The value of an operand."""

    def read(self, source: Any, index: Affine) -> Any:
        """The value of a source at an index."""

    def number(self, number: Fit) -> Any:
        """The value of a number that depends on the length."""


class Body:
    """The body of one loop: its graph, and what its node is given."""

    def __init__(self, emission: Around, loop: int) -> None:
        self.emission, self.loop = emission, loop
        rolled = emission.rolled
        self.operands = rolled.bodies[loop]
        self.steps: list[Step] = [emission.located.steps[Place(Each(loop, j), 0)] for j in range(len(self.operands))]
        self.stacked = sorted((e for e in emission.wanted.stacked if e.loop == loop), key=_order)
        self.carries: list[Carry] = []
        self.carry_at: dict[Carried, int] = {}
        self.final_at: dict[Each, int] = {}
        self.find_carries()
        self.wholes: list[Any] = []
        self.graph = fx.Graph()
        self.t = self.graph.placeholder("t")
        self.carry_nodes = [self.graph.placeholder(f"carry_{i}") for i in range(len(self.carries))]
        self.whole_nodes: dict[Any, fx.Node] = {}
        self.nodes: dict[int, fx.Node] = {}
        self.fakes: dict[fx.Node, Any] = {}

    # ------------------------------------------------------------------ what is carried
    def find_carries(self) -> None:
        for read in dict.fromkeys(_carried_in(self.operands)):
            self.add_carry(read)
        last = {c.of: i for i, c in enumerate(self.carries) if c.of is not None}
        for each in sorted((e for e in self.emission.wanted.finals if e.loop == self.loop), key=_order):
            result = Same(each.step, each.port)
            if result not in last:
                last[result] = len(self.carries)
                self.carries.append(Carry(result, None, None))
            self.final_at[each] = last[result]

    def add_carry(self, read: Carried) -> None:
        """A value of n steps before is handed on n times."""
        for i, first in enumerate(reversed(read.first)):
            of, older = (Same(read.step, read.port), None) if i == 0 else (None, len(self.carries) - 1)
            self.carries.append(Carry(of, older, first))
        self.carry_at[read] = len(self.carries) - 1

    def initial(self) -> Iterator[Any]:
        """What the first step is given."""
        for first, node in zip(self.firsts, self.outputs, strict=False):
            yield first if first is not None else _zeros(self.fakes[node])

    # ------------------------------------------------------------------ the graph
    def trace(self, count: Any) -> None:
        """Writes the graph, on the fakes of the first step; the last one has to be as they are."""
        self.firsts = [None if c.first is None else self.emission.operand(c.first) for c in self.carries]
        given = zip(self.carry_nodes, self.firsts, strict=True)
        self.fakes |= {node: first for node, first in given if first is not None}
        for number, (step, operands) in enumerate(zip(self.steps, self.operands, strict=True)):
            if not self.is_fixed(number):
                self.nodes[number] = self.add(step, [self.node(o) for o in operands])
        results = [self.result(e.step, e.port) for e in self.stacked]
        self.outputs = [self.next_of(carry) for carry in self.carries] + results
        self.graph.output(tuple(self.outputs))
        with disable_proxy_modes_tracing():
            first = self.run_on_fakes(0)
            last = self.run_on_fakes(count - 1)
        _require_same(first, last, list(self.nodes.values()))
        self.fakes = first
        for node in self.graph.nodes:
            if node in first:
                node.meta["val"] = first[node]
        self.require_stable()

    def require_stable(self) -> None:
        """Raises NotRolled where a step hands on another kind of value than it was given."""
        for carry, node, result in zip(self.carries, self.carry_nodes, self.outputs, strict=False):
            if carry.first is not None and not _is_same_kind(self.fakes[node], self.fakes[result]):
                raise NotRolled("what a step hands on to the next has another shape or dtype than at first")

    def add(self, step: Step, leaves: Sequence[Any]) -> fx.Node:
        node = self.graph.call_function(*called_with(step, leaves))
        node.meta.update(step.meta)
        return node

    def is_fixed(self, number: int) -> bool:
        """Whether a step is a view that is the same in every turn: then it is made before the loop."""
        if not is_view(self.emission.rolled, self.emission.located, Each(self.loop, number)):
            return False
        return all(self.is_same_each_turn(o) for o in self.operands[number])

    def is_same_each_turn(self, operand: Any) -> bool:
        if isinstance(operand, Same):
            return self.is_fixed(operand.step)
        if isinstance(operand, Fit):
            return not any(a.step for _, a in operand.terms)
        return not isinstance(operand, Formula) and (not isinstance(operand, Read) or not operand.index.step)

    def node(self, operand: Any) -> Any:
        """What the graph has for an operand."""
        if isinstance(operand, Same):
            return self.result(operand.step, operand.port)
        if isinstance(operand, Carried):
            return self.carry_nodes[self.carry_at[operand]]
        if isinstance(operand, Fit):
            return self.number(operand)
        if isinstance(operand, Formula):
            return operand.built(self.affine, self.graph.call_function)
        if isinstance(operand, tuple):
            return [self.node(o) for o in operand]
        if isinstance(operand, Constant) and not isinstance(operand.value, Tensor):
            return operand.value
        if isinstance(operand, Read) and self.is_one_of_many(operand):
            return self.one_of(operand)
        return self.whole(operand)

    def is_one_of_many(self, read: Read) -> bool:
        """Whether a value is another one in each step."""
        return read.index.step != 0

    def one_of(self, read: Read) -> fx.Node:
        """A slice of what is given as a whole."""
        if isinstance(read.source, Items):
            slices, index = self.emission.values[read.source.step], self.affine(read.index)
            whole = self.given(("items", read.source.step), lambda: slices.base)
            if slices.kept:
                return self.graph.call_function(aten.slice.Tensor, (whole, slices.axis, index, self.plus(index, 1)))
            return self.graph.call_function(aten.select.int, (whole, slices.axis, index))
        if is_view(self.emission.rolled, self.emission.located, read.source):
            return self.seen_again(read.source, read.index)
        whole = self.given(read.source, lambda: self.emission.stacked[read.source])
        return self.graph.call_function(aten.select.int, (whole, 0, self.affine(read.index)))

    def seen_again(self, source: Any, index: Affine) -> fx.Node:
        """The view that another loop's step makes, made here: a stack of them would have another layout."""
        step = self.emission.located.steps[Place(source)]
        operands = self.emission.rolled.bodies[source.loop][source.step]
        return self.add(step, [self.node(of_step(source.loop, o, index)) for o in operands])

    def whole(self, operand: Any) -> fx.Node:
        """What is the same in each step; of a tensor of numbers, a copy that is made before the loop."""
        value = self.emission.operand
        if isinstance(operand, Constant):
            return self.given(operand, lambda: aten.lift_fresh_copy.default(value(operand)))
        return self.given(operand, lambda: value(operand))

    def given(self, key: Any, value: Callable[[], Any]) -> fx.Node:
        if key not in self.whole_nodes:
            self.wholes.append(value())
            anchor = next(reversed(self.whole_nodes.values()), (self.carry_nodes or [self.t])[-1])
            with self.graph.inserting_after(anchor):
                self.whole_nodes[key] = self.graph.placeholder(f"whole_{len(self.wholes) - 1}")
            self.fakes[self.whole_nodes[key]] = self.wholes[-1]
        return self.whole_nodes[key]

    def result(self, step: int, port: int | None) -> fx.Node:
        if step not in self.nodes:
            return self.given(("fixed", step, port), lambda: self.fixed(step, port))
        node = self.nodes[step]
        return node if port is None else self.graph.call_function(operator.getitem, (node, port))

    def fixed(self, step: int, port: int | None) -> Any:
        """A view made before the loop."""
        value = self.emission.read(Each(self.loop, step), Affine())
        return value if port is None else value[port]

    def next_of(self, carry: Carry) -> fx.Node:
        if carry.of is not None:
            return self.result(carry.of.step, carry.of.port)
        assert carry.older is not None
        return self.carry_nodes[carry.older]

    # ------------------------------------------------------------------ numbers
    def number(self, fit: Fit) -> Any:
        """A number of a body: what depends on the step is computed there, the rest is given."""
        constant = Fit(tuple((term, Affine(0, a.length, a.constant)) for term, a in fit.terms))
        rest = self.given_number(constant)
        steps = [(term, a.step) for term, a in fit.terms if a.step]
        for term, step in steps:
            factor = self.given_number(Fit(((term, Affine(0, 0, step)),)))
            rest = self.plus(rest, self.times(factor))
        return rest

    def affine(self, affine: Affine) -> Any:
        """The same of one function of the step and the length."""
        at = Fit(((ONE, Affine(0, affine.length, affine.constant)),))
        return self.plus(self.given_number(at), self.times(affine.step))

    def given_number(self, fit: Fit) -> Any:
        value = self.emission.number(fit)
        return value if isinstance(value, int) else self.given(fit, lambda: value)

    def times(self, factor: Any) -> Any:
        if isinstance(factor, int) and factor == 1:
            return self.t
        return self.graph.call_function(operator.mul, (self.t, factor))

    def plus(self, x: Any, y: Any) -> Any:
        return y if isinstance(x, int) and x == 0 else self.graph.call_function(operator.add, (x, y))

    # ------------------------------------------------------------------ on fakes
    def run_on_fakes(self, t: Any) -> dict[fx.Node, Any]:
        """The values of all nodes in step t."""
        given = {**self.fakes, self.t: t}
        return values_of(self.graph, [given.get(node) for node in self.graph.find_nodes(op="placeholder")])

    def results(self, count: Any) -> tuple[Tensor, ...]:
        """Fakes of what the loop returns."""
        with disable_proxy_modes_tracing():
            last = [like(self.fakes[n]) for n in self.outputs[: len(self.carries)]]
            stacked = [like(self.fakes[n], count) for n in self.outputs[len(self.carries) :]]
        return (*last, *stacked)

    def module(self) -> fx.GraphModule:
        """The graph, ready to be called."""
        return fx.GraphModule({}, self.graph, "Loop")


def of_step(loop: int, operand: Any, index: Affine) -> Any:
    """An operand of a loop's step as what is outside of the loop reads it, of the step at an index."""
    if isinstance(operand, Same):
        return Read(Each(loop, operand.step, operand.port), index)
    if isinstance(operand, Read):
        return Read(operand.source, operand.index.after(index))
    if isinstance(operand, Fit):
        return Fit(tuple((term, affine.after(index)) for term, affine in operand.terms))
    return operand


def _order(each: Each) -> tuple[int, int]:
    return each.step, -1 if each.port is None else each.port


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.device, tuple(str(n) for n in value.shape)
    return [_kind(v) for v in value] if isinstance(value, list | tuple) else None


def _is_same_kind(given: Tensor, result: Tensor) -> bool:
    """Whether one may stand for the other; sizes under other names that are equal now are assumed to stay so."""
    is_alike = (given.dtype, given.device, given.dim()) == (result.dtype, result.device, result.dim())
    return is_alike and all(bool(n == m) for n, m in zip(given.shape, result.shape, strict=True))


def _require_same(first: dict[fx.Node, Any], last: dict[fx.Node, Any], nodes: Sequence[fx.Node]) -> None:
    """Raises NotRolled where the last step makes another kind of value than the first."""
    if any(_kind(first[n]) != _kind(last[n]) for n in nodes):
        raise NotRolled("the shapes of its values depend on the step")


def called_with(step: Step, leaves: Sequence[Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call of a step on these: its target, and its arguments."""
    supply = iter(leaves)
    args, kwargs = with_leaves(step.form, lambda: next(supply))
    return (*step.target.bound(args), kwargs) if isinstance(step.target, InnerLoop) else (step.target, args, kwargs)


def _zeros(fake: Tensor) -> Tensor:
    return torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)

