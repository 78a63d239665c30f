"""Sizes that may be one although the capture took them for two or more: another capture, at one, is the same program.

    captured for M >= 2:  sum(x[M, 64], axes=(1,))      captured at M = 1:  sum(x[1, 64], axes=(1,))

Both are compared value by value, with M = 1 put in and without axes of size one. Then kernels for M hold for one, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import sympy
import torch

from ....ir import Graph, Value, building, emit
from ....ir.errors import LoweringError
from ....ir.loops.body import Body
from ....ir.loops.unroll import at_sizes
from ....ir.prims import PRIMS
from ....ir.transforms.ops import reshape
from ....ir.types import TensorType
from ....tracer.trace import CaptureError
from ...capture.captured_backward import predicted_kinds
from ...compiled.compiled import Compiled
from ...execution.graph_to_kernels import graph_of, optimize
from ...specialize.pipeline import specialize
from ...specialize.specialization import Specialization
from ...values.sizes import traced_numbers
from ...values.tensor_specs import fake_tensor

MOST = 2
"""Of so many sizes every combination is captured again; any more have to be two at least."""


def may_be_one(
    compiler: Compiled, spec: Specialization, args: Sequence[Any], among: Iterable[sympy.Symbol]
) -> set[sympy.Symbol]:
    """The sizes, of those given, that may be one, each for itself and with any of the others."""
    proved: set[sympy.Symbol] = set()
    for symbol in among:
        if len(proved) < MOST and all(_is_same(compiler, spec, args, {symbol, *subset}) for subset in _subsets(proved)):
            proved.add(symbol)
    return proved


def _subsets(items: Iterable[sympy.Symbol]) -> Iterator[tuple[sympy.Symbol, ...]]:
    listed = sorted(items, key=str)
    return (subset for n in range(len(listed) + 1) for subset in combinations(listed, n))


def _is_same(compiler: Compiled, spec: Specialization, args: Sequence[Any], ones: set[sympy.Symbol]) -> bool:
    """True where a capture with these sizes at one is the program that was captured, with one put in."""
    captured = spec.captured
    at_one = {s: sympy.Integer(1) for s in ones}
    sizes, conditions = {**captured.sizes(args), **at_one}, captured.session.conditions(captured.symbols)
    if any(g.xreplace(sizes) is sympy.false for g in conditions):
        return False
    try:
        again = specialize(compiler.user.cls, resized(spec, args, at_one), captured.reads, captured.dynamic)
        numbers = Numbering()
        return _program(again, numbers, _renaming(again, spec)) == _program(spec, numbers, at_one)
    except (CaptureError, LoweringError, KeyError):
        return False


def resized(spec: Specialization, args: Sequence[Any], at_one: Mapping[Any, Any]) -> list[Any]:
    """The arguments with those sizes at one."""
    captured = spec.captured
    sizes = {**captured.sizes(args), **at_one}
    resized = list(args)
    for i, fake in zip(captured.slots, captured.forward.fakes, strict=True):
        shape, strides = (traced_numbers(ns, sizes) for ns in (fake.shape, fake.stride()))
        resized[i] = fake_tensor(shape, strides, fake.dtype, fake.device, args[i].requires_grad)
    return resized


def _renaming(again: Specialization, spec: Specialization) -> dict[Any, Any]:
    """The symbols of the one capture for those of the other, by where the arguments tell them."""
    at = {source: s for s, source in spec.captured.binder.sources.items()}
    return {s: at[source] for s, source in again.captured.binder.sources.items()}


def _program(spec: Specialization, numbers: Numbering, putting: Mapping[Any, Any]) -> tuple[Any, ...]:
    """All that was captured, with other sizes put in, for comparison."""
    forward, kinds = spec.captured.forward, predicted_kinds(spec.captured)
    graphs = [graph_of(forward.trace, "forward")]
    if any(forward.needs_input_grad):
        graphs.append(graph_of(spec.backward.entry(kinds).trace, "backward"))
    outputs = [(o.kind, o.index, _substituted(o.value, putting)) for o in forward.outputs]
    layouts = [[_substituted(_expression(n), putting) for n in (*t.shape, *t.stride())] for t in forward.fake_outputs]
    places = (forward.saved, forward.saved_for_forward, forward.dirty, forward.non_differentiable)
    constants = {k: _substituted(_expression(v), putting) for k, v in forward.constants.items()}
    facts = (kinds, forward.is_tuple, outputs, layouts, places, constants, forward.tensor_attributes)
    return (*(numbers.of(g, putting) for g in graphs), facts)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


class Numbering:
    """Numbers for values: equal ones for what is computed alike, in whichever graph and order."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def of(self, graph: Graph, putting: Mapping[Any, Any]) -> tuple[Any, ...]:
        """The results of a graph with other sizes put in, after the passes, and its effects in order."""
        settled = optimize(_without_units(substituted_graph(graph, putting)))
        number_of: dict[int, int] = {}
        for v in (*settled.inputs, *settled.order()):
            params = [(k, p.key if isinstance(p, Body) else p) for k, p in sorted(v.params.items())]
            key = (v.prim, repr(params), repr(v.avals), tuple(number_of[a.id] for a in v.args))
            number_of[v.id] = self.numbers.setdefault(key, len(self.numbers))
        results = [None if o is None else number_of[o.id] for o in settled.outputs]
        writes = [(i, number_of[v.id]) for i, v in settled.mutations.items()]
        effects = [number_of[v.id] for v in settled.order() if PRIMS[v.prim].effect]
        return results, settled.output_strides, writes, effects


def substituted_graph(graph: Graph, putting: Mapping[Any, Any]) -> Graph:
    """The same nodes over other sizes."""
    return at_sizes(graph, putting)


def _without_units(graph: Graph) -> Graph:
    """The same program without axes of size one, where a node does not need them: they hold no element."""
    out = Graph(graph.name)
    env: dict[int, Value] = {}
    for v in graph.inputs:
        strides = _non_unit(v.shape, v.params["strides"])
        env[v.id] = out.input(v.aval.with_shape(_non_unit(v.shape, v.shape)), v.params["name"], strides)
    with building(out):
        for node in graph.order():
            env[node.id] = unit_rules.get(PRIMS[node.prim].family, _with_units)(node, [env[a.id] for a in node.args])
    pairs = zip(graph.outputs, graph.output_strides, strict=True)
    return _finished(out, graph, env, [None if o is None or s is None else _non_unit(o.shape, s) for o, s in pairs])


def _finished(out: Graph, graph: Graph, env: Mapping[int, Value], strides: Sequence[Any]) -> Graph:
    out.mutations = {i: env[v.id] for i, v in graph.mutations.items()}
    return out.returning([None if o is None else env[o.id] for o in graph.outputs], strides)


def _non_unit(shape: Sequence[Any], items: Sequence[Any]) -> tuple[Any, ...]:
    """The items of the axes that are not of size one."""
    return tuple(item for n, item in zip(shape, items, strict=True) if n != 1)


def _with_units(node: Value, args: Sequence[Value]) -> Value:
    """The node on what it is written for."""
    operands = [a if len(a.avals) > 1 else reshape(a, was.shape) for a, was in zip(args, node.args, strict=True)]
    result = emit(node.prim, *operands, **node.params)
    return reshape(result, _non_unit(result.shape, result.shape)) if len(node.avals) == 1 else result


def _source(node: Value, args: Sequence[Value]) -> Value:
    if node.prim != "full":
        return _with_units(node, args)
    return emit("full", **{**node.params, "shape": _non_unit(node.shape, node.shape)})


def _layout(node: Value, args: Sequence[Value]) -> Value:
    if node.prim not in ("broadcast", "reshape"):
        return _with_units(node, args)
    shape = _non_unit(node.shape, node.shape)
    if node.prim == "reshape" or shape == args[0].shape:
        return reshape(args[0], shape)
    places = _non_unit(node.shape, range(node.ndim))
    axes = _non_unit(node.args[0].shape, node.params["axes"])
    return emit("broadcast", args[0], shape=shape, axes=tuple(map(places.index, axes)))


def _reduced(node: Value, args: Sequence[Value]) -> Value:
    if "axes" not in node.params or node.dtype != args[0].dtype:
        return _with_units(node, args)
    shape = node.args[0].shape
    places = _non_unit(shape, range(len(shape)))
    axes = tuple(places.index(a) for a in node.params["axes"] if shape[a] != 1)
    return emit(node.prim, args[0], axes=axes) if axes else _with_units(node, args)


unit_rules: dict[str, Callable[[Value, Sequence[Value]], Value]] = {
    "elementwise": lambda node, args: emit(node.prim, *args, **node.params),
    "source": _source,
    "layout": _layout,
    "reduce": _reduced,
}


def _substituted(item: Any, putting: Mapping[Any, Any]) -> Any:
    """A size, a type, the body of a loop, or nested tuples, with other sizes put in; anything else as it is."""
    if isinstance(item, Body):
        return Body(at_sizes(item.graph, putting))
    if isinstance(item, sympy.Basic):
        value = item.xreplace(putting)
        return int(value) if isinstance(value, sympy.Integer) else value
    if isinstance(item, TensorType):
        return item.with_shape(_substituted(item.shape, putting))
    return tuple(_substituted(i, putting) for i in item) if isinstance(item, tuple) else item
