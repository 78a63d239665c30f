"""The tangents that a backward stands for: its captured graph, transposed in its gradients by the rules of the IR.

    backward: (residuals, g) -> g * w        tangents: (residuals, x_dot) -> x_dot * w

Nothing is derived here but a linear map from its transpose: which derivative it is, the user's backward has said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import sympy

from ...ir import Graph, Value, building
from ...ir.errors import LoweringError
from ...ir.prims import PRIMS
from ...ir.transforms.linearity import NonLinearError
from ...ir.transforms.ops import DIFFERENTIABLE, inline, zeros
from ...ir.transforms.transpose import transpose
from ...ir.types import TensorType
from ...tracer.dtypes import from_torch
from ..capture.captured import present_residuals
from ..execution.pipeline import graph_of, optimize
from .batching.ir_rules import Lowered

if TYPE_CHECKING:
    from ..capture.captured_backward import BackwardEntry
    from ..specialize.specialization import Specialization

Mask = tuple[bool, ...]


def tangents_of(
    spec: Specialization, entry: BackwardEntry, mask: Mask, symbols: Sequence[sympy.Symbol], name: str, backend: str
) -> Lowered | None:
    """(residuals, sizes, outputs, tangents of the arguments in `mask`) -> tangents of the outputs.

    None where the graph is not of primitives alone, or leaves out what an argument would contribute.
    """
    captured = spec.captured
    moving = [i for i, there in enumerate(mask) if there]
    try:
        backward = graph_of(entry.trace, f"{captured.name}_backward")
    except LoweringError:
        return None
    entry.assume(captured.session.conditions(captured.symbols, entry.since))
    if not _is_pure(backward) or not all(captured.forward.needs_input_grad[i] for i in moving):
        return None
    try:
        graph = _pushing(spec, backward, moving)
    except NonLinearError:
        return None
    first = len(present_residuals(captured))
    values = first + len(symbols) + len(captured.forward.tensor_outputs) + len(moving)
    sources = {s: (first + at, "value", 0) for at, s in enumerate(symbols)}
    return Lowered(entry.trace, optimize(graph), [None] * values, sources, name, backend, tells=False)


def _is_pure(graph: Graph) -> bool:
    return not graph.mutations and all(PRIMS[v.prim].family not in ("extern", "pick") for v in graph.order())


def _pushing(spec: Specialization, backward: Graph, moving: Sequence[int]) -> Graph:
    """The transposed graph, over the tensors of a tangent unit's arguments, and what the trace took from outside."""
    captured = spec.captured
    first = len(present_residuals(captured))
    likes = backward.inputs[first : first + len(captured.forward.tensor_outputs)]
    linear = [v.params["index"] for v in likes if v.dtype in DIFFERENTIABLE]
    given = {i: backward.outputs[i] for i in moving if backward.outputs[i] is not None}
    backward.returning(list(given.values()))
    transposed = transpose(backward, linear)
    out = Graph(f"{backward.name}_transposed")
    residuals = [out.input(v.aval, v.params["name"], v.params["strides"]) for v in backward.inputs[:first]]
    outputs = [out.input(v.aval, f"{v.params['name']}_like") for v in likes]
    tangents = {i: out.input(type_of(spec, i), f"{captured.names[i]}_dot") for i in moving}
    lifted = [_again(out, v) for v in backward.inputs[first + len(likes) :]]
    rest = [o for v, o in zip(likes, outputs, strict=True) if v.dtype not in DIFFERENTIABLE]
    with building(out):
        pushed = iter(inline(transposed, [*residuals, *rest, *lifted, *(tangents[i] for i in given)]))
        return out.returning([_or_zeros(next(pushed), v) if v.dtype in DIFFERENTIABLE else None for v in likes])


def _again(out: Graph, source: Value) -> Value:
    return out.input(source.aval, source.params["name"], source.params["strides"])


def _or_zeros(tangent: Value | None, like: Value) -> Value:
    return zeros(like.aval) if tangent is None else tangent


def type_of(spec: Specialization, argument: int) -> TensorType:
    """The type of a tangent is that of its argument."""
    fake: Any = spec.captured.forward.fakes[spec.captured.slots.index(argument)]
    return TensorType(tuple(n if isinstance(n, int) else n.node.expr for n in fake.shape), from_torch(fake.dtype))
