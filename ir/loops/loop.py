"""A `scan` that is still to be emitted: its body and its operands by kind, so that a transform can regroup them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ..graph import Graph, Value, building, emit, provenance
from ..rewrite import extract
from ..types import Size
from .body import Body, Operands, operands_of

Pairs: TypeAlias = Iterable[tuple[Value, Value]]
"""Values of a body, and the operands of the loop that they are a step of, or the whole."""
Rebuilt: TypeAlias = "Callable[[Value, list[Value]], Sequence[Value | None] | None]"
"""(a scan, its operands in the new graph) -> its results there, or None for the scan as it is."""


@dataclass(frozen=True)
class Loop:
    """`body`: inputs (carries, one step of each x, wholes), outputs (carries, one step of each y)."""

    body: Graph
    init: tuple[Value, ...]
    xs: tuple[Value, ...]
    wholes: tuple[Value, ...]
    length: Size
    reverse: bool

    @property
    def params(self) -> dict[str, Any]:
        counts = {"carries": len(self.init), "steps": len(self.xs)}
        return {"body": Body(self.body), **counts, "length": self.length, "reverse": self.reverse}

    @property
    def results(self) -> list[Value]:
        """What a step gives: carries, then one step of each y."""
        return [o for o in self.body.outputs if o is not None]

    @property
    def inputs(self) -> Operands:
        """The inputs of the body by kind."""
        count = {"carries": len(self.init), "steps": len(self.xs)}
        return operands_of(count, self.body.inputs)

    @property
    def read(self) -> tuple[list[tuple[Value, Value]], list[tuple[Value, Value]]]:
        """The inputs of the body that are steps and wholes, each with its operand."""
        inputs = self.inputs
        return list(zip(inputs.xs, self.xs, strict=True)), list(zip(inputs.wholes, self.wholes, strict=True))

    def emit(self) -> list[Value]:
        """The results: the last carries, then what the steps give. Where they give nothing there is no loop."""
        if not self.results:
            return []
        return results_of(emit("scan", *self.init, *self.xs, *self.wholes, **self.params))

    def dependents(self, moving: Iterable[int]) -> set[int]:
        """The inputs of the body, by number, that are among `moving` or are carried on from these."""
        found = set(moving)
        while True:
            ids = below(self.body, [self.body.inputs[i] for i in found])
            carried = {i for i, o in enumerate(self.results[: len(self.init)]) if o.id in ids}
            if carried <= found:
                return found
            found |= carried

    def moved(self, moving: Iterable[int]) -> list[bool]:
        """Which results depend on these inputs of the body."""
        depends = self.dependents(moving)
        ids = below(self.body, [self.body.inputs[i] for i in depends])
        return [i in depends if i < len(self.init) else o.id in ids for i, o in enumerate(self.results)]

    def part(self, carries: Sequence[int], xs: Pairs, wholes: Pairs, ys: Sequence[Value]) -> Loop:
        """A loop of the same steps with some of the carries, other operands, and other results."""
        steps, same = list(xs), list(wholes)
        inputs = [*(self.body.inputs[i] for i in carries), *(v for v, _ in (*steps, *same))]
        body = extract([*(self.results[i] for i in carries), *ys], inputs, name=self.body.name)
        init = tuple(self.init[i] for i in carries)
        return replace(self, body=body, init=init, xs=tuple(o for _, o in steps), wholes=tuple(o for _, o in same))

    def without_unread(self) -> Loop:
        """The loop without the operands that no step reads."""
        live = self.body.live()
        xs, wholes = ([(v, o) for v, o in pairs if v.id in live] for pairs in self.read)
        if len(xs) == len(self.xs) and len(wholes) == len(self.wholes):
            return self
        carries = range(len(self.init))
        return self.part(carries, xs, wholes, self.results[len(self.init) :])


def loop_of(node: Value, args: Sequence[Value] | None = None) -> Loop:
    """The loop that a node is, on these operands."""
    params = node.params
    init, xs, wholes = operands_of(params, node.args if args is None else args)
    return Loop(params["body"].graph, tuple(init), tuple(xs), tuple(wholes), params["length"], params["reverse"])


def results_of(node: Value) -> list[Value]:
    """The single results of a node of the graph being built."""
    return [node] if len(node.avals) == 1 else [emit("pick", node, index=i) for i in range(len(node.avals))]


def below(graph: Graph, values: Iterable[Value]) -> set[int]:
    """The ids of these values and of all that is made of them; of a loop's results those that are."""
    found = {v.id for v in values}
    of_loops: dict[int, list[bool]] = {}
    for node in graph.order():
        hits = [i for i, a in enumerate(node.args) if a.id in found]
        if hits and node.prim == "scan":
            of_loops[node.id] = loop_of(node).moved(hits)
        if node.prim == "pick" and node.args[0].id in of_loops:
            hits = hits if of_loops[node.args[0].id][node.params["index"]] else []
        if hits and any(of_loops.get(node.id, (True,))):
            found.add(node.id)
    return found


def scans_of(graph: Graph) -> list[Value]:
    return [v for v in graph.order() if v.prim == "scan"]


def results_read(node: Value) -> set[int]:
    """The results of a node that something live reads, or that are results of its graph."""
    graph = node.graph
    live, returned = graph.live(), set(graph.results)
    if len(node.avals) == 1:
        return {0}
    return {u.params["index"] for u in node.users if u.id in live or u in returned}


def rebuild_scans(graph: Graph, rebuilt: Rebuilt) -> Graph:
    """A copy of the graph with other results in place of those of its scans."""
    if not scans_of(graph):
        return graph
    out = Graph(graph.name)
    env: dict[int, Any] = {v.id: out.input_like(v) for v in graph.inputs}
    with building(out):
        for node in graph.order():
            with provenance(node.origin):
                env[node.id] = _rebuilt(node, [env[a.id] for a in node.args], rebuilt)
    out.mutations = {i: env[v.id] for i, v in graph.mutations.items()}
    return out.returning([None if o is None else env[o.id] for o in graph.outputs], graph.output_strides)


def _rebuilt(node: Value, args: list[Any], rebuilt: Rebuilt) -> Any:
    """A value, or the list of results of a scan that has several."""
    if node.prim == "pick" and isinstance(args[0], list):
        return args[0][node.params["index"]]
    results = rebuilt(node, args) if node.prim == "scan" else None
    if results is None:
        return emit(node.prim, *args, **node.params)
    return results[0] if len(node.avals) == 1 else list(results)
