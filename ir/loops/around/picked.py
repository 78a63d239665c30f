"""Single steps of what a loop gives are carried to its end, where something else is made of them.

    gx[:, 0].sum()    ->    first = first + where(t == 0, y, 0) in each step; first.sum() behind the loop

As sums, which chunks of time and programs that share a step may have parts of; all but one step add zero.

Otherwise all steps would have to be in memory first, and another kernel would read the few that are wanted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...graph import Graph, Value, emit
from ...rewrite import make, nodes_between
from ...switches import is_on
from ...transforms.ops import zeros
from ...types import FLOATS, LOW_FLOATS, Size, TensorType, simplify_size
from ..loop import scans_of
from ..tidy import in_bodies
from .carrying import Carrying, carried_along

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
        aval = carrying.result(self.number).aval
        start = zeros(TensorType(aval.shape, "f32") if aval.dtype in LOW_FLOATS else aval)
        at = carrying.step_of(emit("iota", size=carrying.loop.length, dtype="i64"))
        numbers = [
            carrying.carry(start, partial(self._with_step, carrying, at, simplify_size(self.start + n)))
            for n in range(self.count)
        ]
        return lambda: self._of([self._end(carrying.ends[n], carrying.loop.length, env) for n in numbers])

    def _with_step(self, carrying: Carrying, at: Value, step: Size, before: Value) -> Value:
        here, y = _is(at, step, before), make("cast", carrying.result(self.number), dtype=before.dtype)
        if before.dtype not in FLOATS:
            return emit("where", here, y, before)
        return emit("add", before, emit("where", here, y, zeros(before.aval)))

    def _end(self, end: Value, length: Size, env: Mapping[int, Any]) -> Value:
        """The step; what the slice is of where there is none."""
        end = make("cast", end, dtype=self.node.dtype)
        if self.otherwise is None:
            return end
        behind = env[self.otherwise.id]
        first = {"start": (0,) * behind.ndim, "stop": (1, *behind.shape[1:]), "step": (1,) * behind.ndim}
        other = make("reshape", make("slice", behind, **first), shape=end.shape)
        return emit("where", _is(emit("full", value=length, shape=(), dtype="i64"), 0, end), other, end)

    def _of(self, ends: Sequence[Value]) -> Value:
        """The slice, made of the steps that were carried."""
        steps = [make("reshape", e, shape=(1, *e.shape)) for e in ends]
        taken = make("cat", *steps, axis=0) if len(steps) > 1 else steps[0]
        moved = make("permute", taken, perm=self.perm)
        params = {k: list(v) for k, v in self.node.params.items()}
        time = self.perm.index(0)
        params["start"][time], params["stop"][time] = 0, self.count
        return make("slice", moved, **{k: tuple(v) for k, v in params.items()})


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


@dataclass(frozen=True)
class PickedSteps:
    """Graph -> an equal graph whose loops carry the single steps that something else is made of."""

    def __call__(self, graph: Graph) -> Graph:
        return _with_picked(in_bodies(graph, self)) if is_on("picked_steps") and scans_of(graph) else graph


def _with_picked(graph: Graph) -> Graph:
    results = set(graph.results)
    slices = (v for v in graph.order() if v.prim == "slice" and v not in results)
    found = [p for v in slices if (p := _Picked.of(v)) is not None]
    asked: Counter[tuple[Value, int]] = Counter()
    for p in found:
        asked[p.scan, p.number] += p.count
    picked: defaultdict[int, list[_Picked]] = defaultdict(list)
    for p in found:
        # of a result whose steps are wanted one by one, all are in memory anyway
        if asked[p.scan, p.number] + sum(q.count for q in picked[p.scan.id] if q.number != p.number) <= CARRIED:
            picked[p.scan.id].append(p)
    return carried_along(graph, picked)
