"""Rules of `aten` nodes for the transforms of the IR: torch.func applied to that one operation, traced and lowered.

A rule is traced once for the operation, its constants and the types of its operands, with a symbol for every size, and
is then said in the sizes of the caller. Where torch has no rule, or one that holds for some sizes alone, there is none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from ....ir import Graph, Value
from ....ir.errors import FusegradError
from ....ir.loops.body import Body
from ....ir.loops.unroll import at_sizes
from ....ir.transforms.extern import Batched, no_rule_error
from ....ir.types import Size, TensorType
from ....tracer.capture.capture import Session
from ....tracer.containers import with_replaced
from ....tracer.dtypes import TO_TORCH
from ....tracer.lowering.aten import lower
from ....tracer.torch_private import expression_of
from ...execution.aten import reference
from ...values.tensor_specs import fake_tensor

Tensor = torch.Tensor
Sizes = dict[sympy.Symbol, Any]
EIGHT = 8
"""Sizes to trace at are different multiples of it, so that the usual parts of sizes are whole numbers."""


class OpRules:
    """torch.func's rules, one operation at a time (`ExternRules`)."""

    def batch(self, node: Value, mapped: tuple[bool, ...], size: Size, randomness: str) -> Batched:
        """torch.vmap of the operation."""
        types = [
            a.aval.with_shape((size, *a.shape)) if m else a.aval for a, m in zip(node.args, mapped, strict=True)
        ]
        dims = tuple(0 if m else None for m in mapped)

        def many(call: Callable[..., Any], *xs: Tensor) -> Any:
            return torch.vmap(call, dims, randomness=randomness)(*xs)

        return Batched(_rule("vmap", node, tuple(types), many, mapped), (True,) * len(node.avals))

    def jvp(self, node: Value, wrt: tuple[int, ...]) -> Graph:
        """torch.func.jvp: the operation's forward derivative."""
        operands, results = [a.aval for a in node.args], list(node.avals)
        n, first = len(operands), len(operands) + len(results)

        def pushed(call: Callable[..., Any], *xs: Tensor) -> Any:
            primals, tangents = [xs[i] for i in wrt], list(xs[first:])
            moved = torch.func.jvp(_in(call, xs[:n], wrt), tuple(primals), tuple(tangents))[1]
            return _differentiable_only(moved, results)

        return _rule("jvp", node, (*operands, *results, *(operands[i] for i in wrt)), pushed, wrt)

    def vjp(self, node: Value, wrt: tuple[int, ...], given: tuple[int, ...]) -> Graph:
        """torch.func.vjp: the operation's derivative formula."""
        operands, results = [a.aval for a in node.args], list(node.avals)
        n, first = len(operands), len(operands) + len(results)

        def pulled(call: Callable[..., Any], *xs: Tensor) -> Any:
            moving = _in(call, xs[:n], wrt)

            def some(*values: Tensor) -> Any:
                outputs = moving(*values)
                return tuple(outputs[i] if isinstance(outputs, tuple) else outputs for i in given)

            return torch.func.vjp(some, *(xs[i] for i in wrt))[1](tuple(xs[first:]))

        return _rule("vjp", node, (*operands, *results, *(results[i] for i in given)), pulled, (wrt, given))

    def is_linear(self, node: Value, wrt: tuple[int, ...]) -> bool | None:
        """Not known: torch does not tell."""
        return None

    def keeps_zero(self, node: Value, wrt: tuple[int, ...]) -> bool:
        return False


OP_RULES = OpRules()


def _in(call: Callable[..., Any], operands: Sequence[Tensor], wrt: tuple[int, ...]) -> Callable[..., Any]:
    """The operation as a function of some of its operands."""

    def moving(*values: Tensor) -> Any:
        return call(*with_replaced(operands, wrt, values))

    return moving


def _differentiable_only(moved: Any, results: Sequence[TensorType]) -> tuple[Any, ...]:
    """Tangents of the results; None for integers, which have none."""
    each = moved if isinstance(moved, tuple) else (moved,)
    return tuple(t if TO_TORCH[r.dtype].is_floating_point else None for t, r in zip(each, results, strict=True))


# ------------------------------------------------------------------ tracing one operation
def _rule(
    transform: str, node: Value, types: tuple[TensorType, ...], fn: Callable[..., Any], selection: Any
) -> Graph:
    if node.prim != "aten":
        raise no_rule_error(transform, node, "is no pure operation of torch's")
    key = (transform, node.params["op"], node.params["spec"], node.avals, types, selection)
    if key not in _known:
        if len(_known) >= MOST:
            _known.clear()
        _known[key] = _traced(transform, node, types, fn)
    rule = _known[key]
    if isinstance(rule, str):
        raise no_rule_error(transform, node, rule)
    return rule


MOST = 1024
_known: dict[Any, Graph | str] = {}


def _traced(transform: str, node: Value, types: tuple[TensorType, ...], fn: Callable[..., Any]) -> Graph | str:
    """The rule as a graph; a reason where there is none."""
    session = Session()
    try:
        fakes = [session.fake(_stand_in(t, _numbers(types))) for t in types]
        sizes = {s: f.shape[i] for t, f in zip(types, fakes, strict=True) for i, s in enumerate(t.shape)}
        call = functools.partial(_called, node, {s: n for s, n in sizes.items() if isinstance(s, sympy.Symbol)})
        trace = session.trace(lambda *xs: fn(call, *xs), fakes, from_source=False)
        if trace.lifted or trace.opaque:
            return "has a rule that reads tensors of its own"
        graph = lower(trace.graph_module, fakes, name=transform)
    except (FusegradError, RuntimeError, ValueError, TypeError, KeyError, NotImplementedError) as error:
        return f"has no rule in torch: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    meaning = _meaning(fakes, types)
    guards = [g.expr.xreplace(meaning) for g in session.env.guards]
    if any(sympy.simplify(g) is not sympy.true for g in guards):
        return "has a rule that holds for some sizes alone"
    return _in_sizes_of_caller(graph, types, meaning)


def _called(node: Value, sizes: Sizes, *operands: Tensor) -> Any:
    """The operation on its operands; several results as a tuple."""
    result = reference.call_node(node, operands, sizes, torch.device("cpu"))
    return tuple(result) if isinstance(result, list) else result


def _numbers(types: Sequence[TensorType]) -> dict[sympy.Symbol, int]:
    """A number for every symbol, all different."""
    symbols = {s for t in types for n in t.shape if isinstance(n, sympy.Basic) for s in n.free_symbols}
    return {s: EIGHT * (i + 2) for i, s in enumerate(sorted(symbols, key=str))}


def _stand_in(of: TensorType, numbers: dict[sympy.Symbol, int]) -> Tensor:
    shape = [n if isinstance(n, int) else int(n.xreplace(numbers)) for n in of.shape]
    return fake_tensor(tuple(shape), None, TO_TORCH[of.dtype], torch.device("cpu"), False)


def _meaning(fakes: Sequence[Tensor], types: Sequence[TensorType]) -> dict[sympy.Symbol, Any]:
    """The symbols of the trace in the sizes of the caller."""
    meaning: dict[sympy.Symbol, Any] = {}
    for fake, type_ in zip(fakes, types, strict=True):
        for size, meant in zip(fake.shape, type_.shape, strict=True):
            if isinstance(size, torch.SymInt):
                meaning.setdefault(expression_of(size), sympy.sympify(meant))
    return meaning


def _in_sizes_of_caller(graph: Graph, types: Sequence[TensorType], meaning: dict[sympy.Symbol, Any]) -> Graph:
    out = Graph(graph.name)
    env = {v.id: out.input(t, v.params["name"]) for v, t in zip(graph.inputs, types, strict=True)}
    for value in graph.order():
        if value.prim != "input":
            params = {k: _said(v, meaning) for k, v in value.params.items()}
            env[value.id] = out.emit(value.prim, [env[a.id] for a in value.args], params)
    return out.returning([None if o is None else env[o.id] for o in graph.outputs])


def _said(param: Any, meaning: dict[sympy.Symbol, Any]) -> Any:
    """A parameter with its sizes put in."""
    if isinstance(param, sympy.Basic):
        size = param.xreplace(meaning)
        return int(size) if size.is_Integer else size
    if isinstance(param, TensorType):
        return param.with_shape(tuple(_said(n, meaning) for n in param.shape))
    if isinstance(param, Body):
        return Body(at_sizes(param.graph, meaning))
    return tuple(_said(p, meaning) for p in param) if type(param) is tuple else param
