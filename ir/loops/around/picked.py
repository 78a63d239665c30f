"""Single steps of what a loop gives are carried to its end, where something else is made of them.

    gx[:, 0].sum()    ->    first = first + where(t == 0, y, 0) in each step; first.sum() behind the loop

As sums, which chunks of time and programs that share a step may have parts of; all but one step add zero.

Otherwise all steps would have to be in memory first, and another kernel would read the few that are wanted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from ...graph import Graph, Value, emit
from ...passes.cost import estimate
from ...rewrite import copy_into, make, nodes_between
from ...switches import is_on
from ...transforms.ops import zeros
from ...types import FLOATS, LOW_FLOATS, Size, TensorType, simplify_size
from ..loop import loop_of, scans_of
from ..parts import part_along
from ..tidy import in_bodies
from .carrying import Carrying, Wanted, carried_along
from .cut import cheapest

MOST = 2
"""Steps that are carried for one who asks."""
CARRIED = 4
"""Steps that one loop carries so: each takes as many registers as a state."""


@dataclass(frozen=True)
class _Picked:
    """A slice along the time of a loop: the result of its steps, and which of them, from `start` on.

    node: the slice. perm: how the axes of that result were moved before. otherwise: what it is of where the loop has no
    steps.
    """

    node: Value
    scan: Value
    number: int
    perm: tuple[int, ...]
    start: Size
    count: int
    otherwise: Value | None

    @staticmethod
    def of(value: Value) -> _Picked | None:
        """None where a slice has more steps, or is of something else."""
        (source,) = value.args
        perm = tuple(range(value.ndim))
        while source.prim == "permute":
            perm = tuple(source.params["perm"][a] for a in perm)
            (source,) = source.args
        time = perm.index(0) if perm else 0
        start, count = value.params["start"][time], value.shape[time] if perm else 0
        if not isinstance(count, int) or not 0 < count <= MOST or value.params["step"][time] != 1:
            return None
        found = _first_of(source, start, count) if source.prim == "cat" else (source, None)
        if found is None or found[0].prim != "pick" or found[0].args[0].prim != "scan":
            return None
        ((scan,), number) = found[0].args, found[0].params["index"]
        is_step = number >= scan.params["carries"]
        return _Picked(value, scan, number, perm, start, count, found[1]) if is_step else None

    @property
    def outside(self) -> list[Value]:
        return [] if self.otherwise is None else [self.otherwise]

    def carry(self, carrying: Carrying, env: Mapping[int, Any]) -> Callable[[], Value]:
        """Each of the steps is a state that the loop adds to when it comes to it."""
        y, steps = carrying.result(self.number), [simplify_size(self.start + n) for n in range(self.count)]
        numbers = [_carried_at(carrying, y, step)[0] for step in steps]
        return lambda: self.of_steps([self._end(carrying.ends[n], carrying.loop.length, env) for n in numbers])

    def _end(self, end: Value, length: Size, env: Mapping[int, Any]) -> Value:
        """The step; what the slice is of where there is none."""
        end = make("cast", end, dtype=self.node.dtype)
        if self.otherwise is None:
            return end
        behind = env[self.otherwise.id]
        first = {"start": (0,) * behind.ndim, "stop": (1, *behind.shape[1:]), "step": (1,) * behind.ndim}
        other = make("reshape", make("slice", behind, **first), shape=end.shape)
        return emit("where", _is(emit("full", value=length, shape=(), dtype="i64"), 0, end), other, end)

    def of_steps(self, ends: Sequence[Value]) -> Value:
        """The slice, made of the steps that were carried."""
        steps = [make("reshape", e, shape=(1, *e.shape)) for e in ends]
        taken = make("cat", *steps, axis=0) if len(steps) > 1 else steps[0]
        moved = make("permute", taken, perm=self.perm)
        params = {k: list(v) for k, v in self.node.params.items()}
        time = self.perm.index(0)
        params["start"][time], params["stop"][time] = 0, self.count
        return make("slice", moved, **{k: tuple(v) for k, v in params.items()})


def _carried_at(carrying: Carrying, y: Value, step: Size) -> tuple[int, str]:
    """A state that the loop adds to when it comes to a step: its number, and the dtype of what is added."""
    start = zeros(TensorType(y.shape, "f32") if y.dtype in LOW_FLOATS else y.aval)
    at = carrying.step_of(emit("iota", size=carrying.loop.length, dtype="i64"))
    return carrying.carry(start, partial(_with_step, y, at, step)), y.dtype


def _with_step(y: Value, at: Value, step: Size, before: Value) -> Value:
    here, now = _is(at, step, before), make("cast", y, dtype=before.dtype)
    if before.dtype not in FLOATS:
        return emit("where", here, now, before)
    return emit("add", before, emit("where", here, now, zeros(before.aval)))


def _is(number: Value, other: Size, like: Value) -> Value:
    """Whether they are equal, for each element of a value."""
    equal = emit("eq", number, emit("full", value=other, shape=(), dtype="i64"))
    return emit("broadcast", equal, shape=like.shape, axes=()) if like.ndim else equal


def _first_of(cat: Value, start: Size, count: int) -> tuple[Value, Value] | None:
    """The first piece of a concatenation along time, whose first step is asked for, and the piece behind it."""
    first, behind = cat.args[:2]
    is_first = cat.params["axis"] == 0 and start == 0 and count == 1
    has_any = isinstance(n := behind.shape[0], int) and n > 0
    if not is_first or not has_any:
        return None
    made_of = nodes_between([behind], [v.id for v in cat.graph.inputs])
    return None if any(v.prim == "scan" for v in made_of) else (first, behind)


class _Step:
    """Results of one step of a loop: the least is carried from which they are made again behind it.

    f(h, x[t]), g(h, x[t])    ->    what h is before step t is carried, not f and g

    Before its first step that is what the loop begins with, and behind its last one what it ends with.
    """

    def __init__(self, picked: Sequence[_Picked]) -> None:
        self.picked, (first, *_) = picked, picked
        self.start, self.loop = first.start, loop_of(first.scan)
        self.ends = [self.loop.results[p.number] for p in picked]
        self.carried: dict[int, tuple[int, str]] = {}
        self.known: dict[int, Value] = {}

    def is_at(self, reverse: bool) -> bool:
        """Whether it is the first, or the last one, of all steps."""
        return bool(self.start == (simplify_size(self.loop.length - 1) if reverse else 0))

    @cached_property
    def at_first(self) -> dict[Value, int]:
        """What is carried, before the first step: numbers among what the loop begins with."""
        is_first = self.is_at(self.loop.reverse)
        return {v: n for n, v in enumerate(self.loop.inputs.carries)} if is_first else {}

    @cached_property
    def at_last(self) -> dict[Value, int]:
        """What the last step makes of it: numbers among what the loop ends with."""
        count, is_last = len(self.loop.init), self.is_at(not self.loop.reverse)
        return {v: n for n, v in enumerate(self.loop.results[:count])} if is_last else {}

    @cached_property
    def cut(self) -> list[Value]:
        """Values of the body that are carried, without what is there once the loop is over."""
        inputs = self.loop.inputs
        at_hand = [*inputs.xs, *inputs.wholes, *self.at_first]
        found = cheapest(self.loop.body, self.ends, self._cost, at_hand)
        return [v for v in found if v not in self.at_last]

    def _cost(self, value: Value) -> int:
        return 0 if value in self.at_last else estimate(value.aval.nbytes)

    @property
    def wins(self) -> bool:
        """Fewer values are carried."""
        return len(self.cut) < len(dict.fromkeys(self.ends))

    def members(self) -> list[_Again]:
        return [_Again(self, p) for p in self.picked]

    def carry(self, carrying: Carrying) -> None:
        """Each value of the cut is a state."""
        if not self.carried:
            self.carried = {v.id: _carried_at(carrying, Value(carrying.body, v.id), self.start) for v in self.cut}

    def values(self, carrying: Carrying) -> dict[int, Value]:
        """Values of the body at that step, made behind the loop."""
        if self.known:
            return self.known
        env = {i: make("cast", carrying.ends[n], dtype=dtype) for i, (n, dtype) in self.carried.items()}
        env |= {v.id: carrying.finals[n] for v, n in self.at_last.items()}
        env |= {v.id: carrying.loop.init[n] for v, n in self.at_first.items() if v not in self.at_last}
        inputs = self.loop.inputs
        env |= {own.id: whole for own, whole in zip(inputs.wholes, carrying.loop.wholes, strict=True)}
        reads = {a.id for v in nodes_between(self.ends, [*env, *(x.id for x in inputs.xs)]) for a in v.args}
        steps = zip(inputs.xs, carrying.loop.xs, strict=True)
        env |= {own.id: _at(x, self.start) for own, x in steps if own.id in reads or own in self.ends}
        copy_into(nodes_between(self.ends, env), env)
        self.known = env
        return env


@dataclass(frozen=True)
class _Again:
    """One of several results of a step."""

    step: _Step
    picked: _Picked

    @property
    def node(self) -> Value:
        return self.picked.node

    @property
    def outside(self) -> list[Value]:
        return []

    def carry(self, carrying: Carrying, env: Mapping[int, Any]) -> Callable[[], Value]:
        self.step.carry(carrying)
        end = self.step.loop.results[self.picked.number]
        return lambda: self.picked.of_steps([self.step.values(carrying)[end.id]])


def _at(operand: Value, step: Size) -> Value:
    """One step of what a loop reads."""
    return make("reshape", part_along(operand, 0, step, simplify_size(step + 1)), shape=operand.shape[1:])


@dataclass(frozen=True)
class PickedSteps:
    """Graph -> an equal graph whose loops carry the single steps that something else is made of."""

    def __call__(self, graph: Graph) -> Graph:
        return _with_picked(in_bodies(graph, self)) if is_on("picked_steps") and scans_of(graph) else graph


def _with_picked(graph: Graph) -> Graph:
    results = set(graph.results)
    slices = (v for v in graph.order() if v.prim == "slice" and v not in results)
    found = [p for v in slices if (p := _Picked.of(v)) is not None]
    wanted: defaultdict[int, list[Wanted]] = defaultdict(list)
    carried: Counter[int] = Counter()
    for step in _steps(found):
        scan = step.picked[0].scan
        if step.wins and carried[scan.id] + len(step.cut) <= CARRIED:
            carried[scan.id] += len(step.cut)
            wanted[scan.id] += step.members()
            found = [p for p in found if p not in step.picked]
    asked: Counter[tuple[Value, int]] = Counter()
    for p in found:
        asked[p.scan, p.number] += p.count
    picked: defaultdict[int, list[_Picked]] = defaultdict(list)
    for p in found:
        # of a result whose steps are wanted one by one, all are in memory anyway
        others = carried[p.scan.id] + sum(q.count for q in picked[p.scan.id] if q.number != p.number)
        if asked[p.scan, p.number] + others <= CARRIED:
            picked[p.scan.id].append(p)
            wanted[p.scan.id].append(p)
    return carried_along(graph, wanted)


def _steps(found: Sequence[_Picked]) -> list[_Step]:
    """Those of one step of a loop together."""
    groups: defaultdict[tuple[Value, Size], list[_Picked]] = defaultdict(list)
    for p in found:
        if p.count == 1 and p.otherwise is None:
            groups[p.scan, p.start].append(p)
    return [_Step(group) for group in groups.values()]
