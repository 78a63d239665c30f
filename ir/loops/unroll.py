"""Loops whose length is a number, step by step: what a scan means, in the other primitives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy

from ..graph import Graph, Value, building, emit, provenance
from ..types import Size, TensorType, simplify_size
from .body import Body
from .loop import Loop, loop_of

Sizes = Mapping[sympy.Symbol, int]


def unroll(graph: Graph, sizes: Sizes) -> Graph:
    """The graph at these sizes, without the scans whose length they say; other symbols remain."""
    out = Graph(graph.name)
    inputs = [out.input(_at(v.aval, sizes), v.params["name"], _at(v.params["strides"], sizes)) for v in graph.inputs]
    with building(out):
        env = _steps(graph, inputs, sizes)
    out.mutations = {i: env[v.id] for i, v in graph.mutations.items()}
    strides = [None if s is None else _at(s, sizes) for s in graph.output_strides]
    return out.returning([None if o is None else env[o.id] for o in graph.outputs], strides)


def at_sizes(graph: Graph, sizes: Sizes) -> Graph:
    """The graph with numbers for some of its symbols, loops and all."""
    out = Graph(graph.name)
    env = {
        v.id: out.input(_at(v.aval, sizes), v.params["name"], _at(v.params["strides"], sizes)) for v in graph.inputs
    }
    with building(out):
        for node in graph.order():
            with provenance(node.origin):
                env[node.id] = emit(node.prim, *(env[a.id] for a in node.args), **_params(node, sizes))
    out.mutations = {i: env[v.id] for i, v in graph.mutations.items()}
    strides = [None if s is None else _at(s, sizes) for s in graph.output_strides]
    return out.returning([None if o is None else env[o.id] for o in graph.outputs], strides)


def _params(node: Value, sizes: Sizes) -> dict[str, Any]:
    return {k: _at(v, sizes) for k, v in node.params.items()}


def _at(param: Any, sizes: Sizes) -> Any:
    """A parameter with numbers for symbols."""
    if isinstance(param, sympy.Basic):
        return simplify_size(param.xreplace(dict(sizes)))
    if isinstance(param, tuple) and not hasattr(param, "_fields"):
        return tuple(_at(p, sizes) for p in param)
    if isinstance(param, TensorType):
        return TensorType(_at(param.shape, sizes), param.dtype)
    return Body(at_sizes(param.graph, sizes)) if isinstance(param, Body) else param


# ------------------------------------------------------------------------------------------------------- steps
def _steps(graph: Graph, inputs: Sequence[Value], sizes: Sizes) -> dict[int, Any]:
    """The values of the graph on these inputs, in the graph being built; a list where there are several results."""
    env: dict[int, Any] = {v.id: a for v, a in zip(graph.inputs, inputs, strict=True)}
    for node in graph.order():
        with provenance(node.origin):
            env[node.id] = _step(node, [env[a.id] for a in node.args], sizes)
    return env


def _step(node: Value, args: list[Any], sizes: Sizes) -> Any:
    if node.prim == "pick" and isinstance(args[0], list):
        return args[0][node.params["index"]]
    if node.prim == "scan" and isinstance(_at(node.params["length"], sizes), int):
        results = unrolled(loop_of(node, args), _at(node.params["length"], sizes), sizes)
        return results if len(results) > 1 else results[0]
    return emit(node.prim, *args, **_params(node, sizes))


def unrolled(loop: Loop, length: int, sizes: Sizes) -> list[Value]:
    """The steps of a loop one after the other."""
    carries, given = list(loop.init), dict[int, list[Value]]()
    for t in reversed(range(length)) if loop.reverse else range(length):
        env = _steps(loop.body, [*carries, *(at_step(x, t) for x in loop.xs), *loop.wholes], sizes)
        results = [env[o.id] for o in loop.results]
        carries, given[t] = results[: len(carries)], results[len(carries) :]
    types = [_at(o.aval, sizes) for o in loop.results[len(carries) :]]
    return [*carries, *(_stack([given[t][i] for t in range(length)], t) for i, t in enumerate(types))]


def at_step(x: Value, step: Size) -> Value:
    """x[step]"""
    rest = x.shape[1:]
    part = emit(
        "slice", x, start=(step, *(0 for _ in rest)), stop=(step + 1, *rest), step=(1,) * x.ndim
    )
    return emit("reshape", part, shape=rest)


def _stack(steps: Sequence[Value], aval: TensorType) -> Value:
    if not steps:
        return emit("full", value=0 if aval.dtype != "b1" else False, shape=(0, *aval.shape), dtype=aval.dtype)
    return emit("cat", *(emit("reshape", s, shape=(1, *s.shape)) for s in steps), axis=0)
