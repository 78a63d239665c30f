"""What is made for the steps of a loop, and is a result as well, is stored step by step.

    d = exp(x), a result, and a loop that reads d[t]        ->    the loop gives exp(x[t]), and d is all of these
    the same beside one that reads d[:-1]                   ->    d is what it gives, and d[-1:]

Otherwise another kernel would make it, and read x again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ...graph import Graph, Value, building, emit, provenance
from ...infer import sizes_equal
from ...prims import PRIMS
from ...rewrite import copy_into
from ...switches import is_on
from ...types import Size, simplify_size
from ..loop import loop_of, scans_of
from ..parts import part_along
from ..tidy import in_bodies
from .carrying import Carrying
from .walked import Walked

MOST = 32
"""Operations by which it is made."""
FEW = 3
"""Steps at either end, at most, that the loop does not read."""
BY_ELEMENT = ("input", "source", "layout", "elementwise")


@dataclass(frozen=True)
class StoredSteps:
    """Graph -> an equal graph whose loops give what they read, where that is a result."""

    def __call__(self, graph: Graph) -> Graph:
        if not is_on("stored_steps") or not scans_of(graph):
            return graph
        graph = in_bodies(graph, self)
        while (found := next(_found(graph), None)) is not None:
            graph = found.stored()
        return graph


def _found(graph: Graph) -> Iterator[_Read]:
    results = {_unmoved(o) for o in graph.outputs if o is not None}
    for scan in scans_of(graph):
        carries, steps = scan.params["carries"], scan.params["steps"]
        reads = (_Read(scan, n, Walked.of(scan.args[carries + n])) for n in range(steps))
        yield from (r for r in reads if r.walked.value in results and r.is_possible)


def _unmoved(value: Value) -> Value:
    """What a value is, but for the order of its axes."""
    while value.prim == "permute":
        (value,) = value.args
    return value


@dataclass(frozen=True)
class _Read:
    """What a loop reads step by step: the operand by its number among such."""

    scan: Value
    number: int
    walked: Walked

    @property
    def stop(self) -> Size:
        return simplify_size(self.walked.start + self.scan.params["length"])

    @property
    def ends(self) -> tuple[Size, Size]:
        """Places before the first step, and behind the last one."""
        return self.walked.start, simplify_size(self.walked.size - self.stop)

    @property
    def is_possible(self) -> bool:
        """It is made element by element of what is there, and read by the loop alone but for few steps."""
        are_few = all(isinstance(n, int) and 0 <= n <= FEW for n in self.ends)
        return are_few and self._is_alone and _is_made(self.walked.value)

    @property
    def _is_alone(self) -> bool:
        """Nothing but the loop reads more than few of its steps."""
        live, own = self.scan.graph.live(), {self.walked.value, *self.walked.views}
        own |= {v for v in self.scan.graph.order() if v.prim == "permute" and _unmoved(v) == self.walked.value}
        users = {u for v in own for u in v.users if u.id in live} - {*own, self.scan}
        return sum(x in own for x in self.scan.args) == 1 and all(map(_takes_few, users))

    # ------------------------------------------------------------------ the graph
    def stored(self) -> Graph:
        """The graph in which the loop gives it."""
        graph, value, given = self.scan.graph, self.walked.value, list[Value]()
        out = Graph(graph.name)
        env: dict[int, Any] = {v.id: out.input_like(v) for v in graph.inputs}
        with building(out):
            copy_into(graph.order(), env, {self.scan.id: self._giving(given)})
            with provenance(value.origin):
                whole = self._whole(env[value.id], given[0])
            outputs = [None if o is None else self._result(o, env, whole) for o in graph.outputs]
        out.mutations = {i: env[v.id] for i, v in graph.mutations.items()}
        return out.returning(outputs, graph.output_strides)

    def _result(self, output: Value, env: dict[int, Any], whole: Value) -> Value:
        """A result of the graph: the same but for the order of its axes, where it is what the loop gives."""
        if output == self.walked.value:
            return whole
        if _unmoved(output) != self.walked.value:
            return env[output.id]  # type: ignore[no-any-return]
        return emit("permute", self._result(output.args[0], env, whole), **output.params)

    def _giving(self, given: list[Value]) -> Callable[[dict[int, Value]], Value]:
        """How the loop is made that gives its steps, which are put down."""

        def build(env: dict[int, Value]) -> Value:
            loop = loop_of(self.scan, [env[a.id] for a in self.scan.args])
            carrying = Carrying(loop)
            carrying.give(Value(carrying.body, loop.inputs.xs[self.number].id))
            first, *_ = carrying.emit()
            given.append(carrying.stacks[0])
            return first.args[0] if len(self.scan.avals) > 1 else first

        return build

    def _whole(self, value: Value, steps: Value) -> Value:
        """All of it, of what the loop gives and of what it does not read."""
        axis, (before, behind) = self.walked.axis, map(int, self.ends)
        first, last = _one_by_one(value, axis, 0, before), _one_by_one(value, axis, self.stop, behind)
        pieces = [*first, self.walked.back(steps), *last]
        return emit("cat", *pieces, axis=axis) if len(pieces) > 1 else pieces[0]


def _one_by_one(value: Value, axis: int, start: Size, count: int) -> list[Value]:
    """Places along an axis, each apart: the kernel of a loop stores single steps."""
    starts = [simplify_size(start + n) for n in range(count)]
    return [part_along(value, axis, at, simplify_size(at + 1)) for at in starts]


def _takes_few(user: Value) -> bool:
    """Few places along an axis."""
    if user.prim != "slice":
        return False
    pairs = zip(user.shape, user.args[0].shape, strict=True)
    return any(isinstance(n, int) and n <= FEW and not sizes_equal(n, size) for n, size in pairs)


def _is_made(value: Value) -> bool:
    """Of inputs, element by element, in few operations."""
    seen, todo = dict[int, Value](), [value]
    while todo and len(seen) <= MOST:
        node = todo.pop()
        if PRIMS[node.prim].family not in BY_ELEMENT:
            return False
        if node.id not in seen:
            seen[node.id] = node
            todo += node.args
    return len(seen) <= MOST and any(PRIMS[v.prim].family == "elementwise" for v in seen.values())
