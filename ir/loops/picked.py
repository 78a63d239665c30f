"""Single steps of what a loop gives are carried to its end, where something else is made of them.

    gx[:, 0].sum()    ->    first = where(t == 0, y, first) in each step; first.sum() behind the loop

Otherwise all steps would have to be in memory first, and another kernel would read the few that are wanted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..graph import Graph, Value, building, emit, provenance
from ..rewrite import copy_into, extract, make, nodes_between
from ..switches import is_on
from ..transforms.ops import zeros
from ..types import Size, TensorType, simplify_size
from .loop import Loop, loop_of, scans_of
from .tidy import in_bodies

MOST = 2
"""Steps that are carried for one who asks."""
CARRIED = 4
"""Steps that one loop carries so: each takes as many registers as a state."""


@dataclass(frozen=True)
class _Picked:
    """A slice along the time of a loop: the result of its steps, and which of them, from `start` on.

    perm: how the axes of that result were moved before. otherwise: what it is of where the loop has no steps.
    """

    slice: Value
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

    def replaced(self, ends: Sequence[Value]) -> Value:
        """The slice, made of the steps that were carried."""
        steps = [make("reshape", e, shape=(1, *e.shape)) for e in ends]
        taken = make("cat", *steps, axis=0) if len(steps) > 1 else steps[0]
        moved = make("permute", taken, perm=self.perm)
        params = {k: list(v) for k, v in self.slice.params.items()}
        time = self.perm.index(0)
        params["start"][time], params["stop"][time] = 0, self.count
        return make("slice", moved, **{k: tuple(v) for k, v in params.items()})


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
    picked: defaultdict[int, list[_Picked]] = defaultdict(list)
    results = set(graph.results)
    for value in (v for v in graph.order() if v.prim == "slice" and v not in results):
        found = _Picked.of(value)
        if found is not None and sum(p.count for p in picked[found.scan.id]) + found.count <= CARRIED:
            picked[found.scan.id].append(found)
    return _Rebuilt(graph, picked).graph() if any(picked.values()) else graph


class _Rebuilt:
    """A copy of a graph; `picked`: by scan the slices that its steps are carried for."""

    def __init__(self, source: Graph, picked: Mapping[int, Sequence[_Picked]]) -> None:
        self.source, self.picked, self.out = source, picked, Graph(source.name)
        self.env: dict[int, Any] = {v.id: self.out.input_like(v) for v in source.inputs}
        self.ends: dict[int, Callable[[], Value]] = {}

    def graph(self) -> Graph:
        source, env = self.source, self.env
        with building(self.out):
            for node in source.order():
                with provenance(node.origin):
                    env[node.id] = env[node.id] if node.id in env else self._made(node)
        self.out.mutations = {i: env[v.id] for i, v in source.mutations.items()}
        outputs = [None if o is None else env[o.id] for o in source.outputs]
        return self.out.returning(outputs, source.output_strides)

    def _made(self, node: Value) -> Any:
        """A value, or the list of results of a loop that carries more than it did."""
        if node.id in self.ends:
            return self.ends[node.id]()
        if self.picked.get(node.id):
            return self._carrying(node, self.picked[node.id])
        args = [self.env[a.id] for a in node.args]
        if node.prim == "pick" and isinstance(args[0], list):
            return args[0][node.params["index"]]
        return emit(node.prim, *args, **node.params)

    def _carrying(self, scan: Value, asked: Sequence[_Picked]) -> list[Value]:
        """The results of a loop; what it carries more is made slices of."""
        before = [p.otherwise for p in asked if p.otherwise is not None]
        copy_into(nodes_between(before, self.env), self.env)
        loop = loop_of(scan, [self.env[a.id] for a in scan.args])
        steps = [(p, at) for p in asked for at in range(p.count)]
        starts = [self._start(p, loop.results[p.number].aval) for p, _ in steps]
        results = _with_steps(loop, [(p.number, simplify_size(p.start + at)) for p, at in steps], starts).emit()
        count, behind = len(loop.init), len(loop.init) + len(steps)
        ends = dict(zip(steps, results[count:behind], strict=True))
        for p in asked:
            self.ends[p.slice.id] = partial(p.replaced, [ends[p, at] for at in range(p.count)])
        return results[:count] + results[behind:]

    def _start(self, asked: _Picked, aval: TensorType) -> Value:
        """What the slice is of where there is no step."""
        if asked.otherwise is None:
            return zeros(aval)
        behind = self.env[asked.otherwise.id]
        first = {"start": (0,) * behind.ndim, "stop": (1, *behind.shape[1:]), "step": (1,) * behind.ndim}
        return make("reshape", make("slice", behind, **first), shape=aval.shape)


def _with_steps(loop: Loop, steps: Sequence[tuple[int, Size]], starts: Sequence[Value]) -> Loop:
    """The loop that carries these results of these steps to its end, behind its own carries."""
    body, inputs = loop.body.copy(), loop.inputs
    with building(body):
        at = body.input(TensorType((), "i64"), "step_at")
        before = [body.input(v.aval, f"picked_{n}") for n, v in enumerate(starts)]
        after = []
        for held, (number, step) in zip(before, steps, strict=True):
            is_here = emit("eq", at, emit("full", value=step, shape=(), dtype="i64"))
            here = emit("broadcast", is_here, shape=held.shape, axes=()) if held.ndim else is_here
            after.append(emit("where", here, Value(body, loop.results[number].id), held))
    carries, xs, wholes = ([Value(body, v.id) for v in kind] for kind in inputs)
    results = [Value(body, o.id) for o in loop.results]
    count = len(loop.init)
    given = [*results[:count], *after, *results[count:]]
    part = extract(given, [*carries, *before, *xs, at, *wholes], name=body.name)
    number = emit("iota", size=loop.length, dtype="i64")
    return replace(loop, body=part, init=(*loop.init, *starts), xs=(*loop.xs, number))
