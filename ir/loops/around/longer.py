"""A step behind a loop that is one of its steps is the last of the loop.

    cat(ys, f(what is carried in the end, x[-1]))    where the loop gives f(h, x[t])    ->    ys of one step more

A loop whose steps begin in the middle of what was written as one leaves the rest of it behind its end. What that last
step carries on is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

from ...graph import Graph, Value, building, emit
from ...infer import is_at_most, same_shape
from ...passes.simplify import Simplify
from ...rewrite import copy_into, make, rebuild
from ...switches import is_on
from ...types import Size, simplify_size
from ..loop import Loop, loop_of, scans_of
from ..parts import part_along
from ..tidy import TidyLoops, in_bodies
from .walked import Walked


@dataclass(frozen=True)
class LongerLoops:
    """Graph -> an equal graph whose loops make the step behind their last one, too."""

    def __call__(self, graph: Graph) -> Graph:
        if not is_on("longer_loops") or not scans_of(graph):
            return graph
        graph = before = in_bodies(graph, self)
        while (found := next(_longer(graph), None)) is not None:
            graph = found
        return graph if graph is before else TidyLoops()(graph)


def _longer(graph: Graph) -> Iterator[Graph]:
    for scan in scans_of(graph):
        behind = _Behind.of(scan)
        if behind is not None and behind.is_step and (longer := behind.graph()) is not None:
            yield longer


@dataclass(frozen=True)
class _Behind:
    """What a loop gives, each in a concatenation beside one more step: these, and the steps."""

    scan: Value
    cats: tuple[Value, ...]
    steps: tuple[Value, ...]

    @staticmethod
    def of(scan: Value) -> _Behind | None:
        count, live = scan.params["carries"], scan.graph.live()
        given = {u.params["index"]: u for u in scan.users if u.id in live and u.prim == "pick"}
        ys = [given.get(n) for n in range(count, len(scan.avals))]
        found = [_beside(y, scan.params["reverse"], live) for y in ys if y is not None]
        if not found or len(found) < len(ys):
            return None
        pairs = [f for f in found if f is not None]
        return _Behind(scan, *map(tuple, zip(*pairs, strict=True))) if len(pairs) == len(found) else None

    @cached_property
    def loop(self) -> Loop:
        return loop_of(self.scan)

    @cached_property
    def walked(self) -> list[Walked]:
        return [Walked.of(x) for x in self.loop.xs]

    def _place(self, walked: Walked) -> Size:
        """Where the step behind the last one is."""
        return simplify_size(walked.start + (-1 if self.loop.reverse else self.loop.length))

    def _is_there(self, walked: Walked) -> bool:
        """There is a further step of what the loop reads."""
        at = self._place(walked)
        return is_at_most(0, at) if self.loop.reverse else is_at_most(at + 1, walked.size)

    @property
    def is_step(self) -> bool:
        """What is behind the loop is what a further step of it gives."""
        if not all(map(self._is_there, self.walked)):
            return False
        graph = self.scan.graph.copy()
        with building(graph):
            made = self._made(graph)
        wanted = [Value(graph, s.id) for s in self.steps]
        plain = Simplify()(graph.returning([*wanted, *made]))
        count = len(wanted)
        return plain.outputs[:count] == plain.outputs[count:]

    def _made(self, graph: Graph) -> list[Value]:
        """What the step behind the last one gives."""
        inputs, count = self.loop.inputs, len(self.loop.init)
        scan = Value(graph, self.scan.id)
        env = {v.id: emit("pick", scan, index=n) for n, v in enumerate(inputs.carries)}
        env |= {v.id: Value(graph, whole.id) for v, whole in zip(inputs.wholes, self.loop.wholes, strict=True)}
        for v, walked in zip(inputs.xs, self.walked, strict=True):
            env[v.id] = _step_at(Value(graph, walked.value.id), walked, self._place(walked))
        copy_into(self.loop.body.order(), env)
        ends = [env[y.id] for y in self.loop.results[count:]]
        return [make("reshape", y, shape=(1, *y.shape)) for y in ends]

    # ------------------------------------------------------------------ the graph
    def graph(self) -> Graph | None:
        """The graph with a longer loop; None where what the loop carries in the end is read by others."""
        made = _Made(self)
        steps = {_alone(s).id: partial(made.last, n) for n, s in enumerate(self.steps)}
        cats = {c.id: partial(made.whole, n) for n, c in enumerate(self.cats)}
        graph = rebuild(rebuild(self.scan.graph, {}, steps | cats), {})
        return graph if len(scans_of(graph)) == len(scans_of(self.scan.graph)) else None

    def longer(self, env: dict[int, Value]) -> Loop:
        loop = loop_of(self.scan, [env[a.id] for a in self.scan.args])
        length = simplify_size(loop.length + 1)
        starts = [self._place(w) if loop.reverse else w.start for w in self.walked]
        pairs = zip(self.walked, starts, strict=True)
        xs = tuple(w.part(env[w.value.id], start, simplify_size(start + length)) for w, start in pairs)
        return replace(loop, xs=xs, length=length)


class _Made:
    """What the longer loop gives, which is made when the first of it is asked for. `env`: the graph being built."""

    def __init__(self, behind: _Behind) -> None:
        self.behind, self._ys = behind, list[Value]()

    def ys(self, number: int, env: dict[int, Value]) -> Value:
        self._ys = self._ys or self.behind.longer(env).emit()[len(self.behind.loop.init) :]
        return self._ys[number]

    def last(self, number: int, env: dict[int, Value]) -> Value:
        """The last step, without its axis of time."""
        loop = self.behind.loop
        at = 0 if loop.reverse else loop.length
        step = part_along(self.ys(number, env), 0, at, simplify_size(at + 1))
        return make("reshape", step, shape=_alone(self.behind.steps[number]).shape)

    def whole(self, number: int, env: dict[int, Value]) -> Value:
        """The concatenation of what the loop gives, and of what is neither of the two."""
        cat, step, scan = self.behind.cats[number], self.behind.steps[number], self.behind.scan
        pieces = [a for a in cat.args if a != step]
        given = [a.prim == "pick" and a.args[0] == scan for a in pieces]
        ys = [self.ys(number, env) if own else env[a.id] for a, own in zip(pieces, given, strict=True)]
        return make("cat", *ys, axis=0) if len(ys) > 1 else ys[0]


def _beside(y: Value, is_first: bool, live: set[int]) -> tuple[Value, Value] | None:
    """The concatenation along time that alone reads what a loop gives, and the one step behind the loop's last."""
    users = [u for u in dict.fromkeys(y.users) if u.id in live]
    if len(users) != 1 or users[0].prim != "cat" or users[0].params["axis"] != 0 or y in y.graph.outputs:
        return None
    (cat,) = users
    at = cat.args.index(y) + (-1 if is_first else 1)
    is_step = 0 <= at < len(cat.args) and cat.args[at].shape[0] == 1 and cat.args.count(y) == 1
    return (cat, cat.args[at]) if is_step and cat.args.count(cat.args[at]) == 1 else None


def _alone(step: Value) -> Value:
    """A step without its axis of time."""
    is_one = step.prim == "reshape" and same_shape(step.args[0].shape, step.shape[1:])
    return step.args[0] if is_one else step


def _step_at(value: Value, walked: Walked, place: Size) -> Value:
    """One place along the axis, the others as the loop reads them."""
    order = [a for a in range(value.ndim) if a != walked.axis]
    part = part_along(value, walked.axis, place, simplify_size(place + 1))
    step = make("reshape", part, shape=tuple(value.shape[a] for a in order))
    return make("permute", step, perm=tuple(order.index(a) for a in walked.perm[1:]))
