"""A jvp by transposition: a pullback's graph, transposed in its cotangents by the rules of the IR.

    pullback: (residuals, g, outside) -> g * w        jvp: (residuals, x_dot, outside) -> x_dot * w

Nothing is derived here but a linear map from its transpose: which derivative it is, the pullback has said. That is the
user's backward (`runtime/functorch`, `runtime/export`), or the vjp of a unit as autograd derives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...ir import Graph, Value, building
from ...ir.loops.body import bodies_of
from ...ir.prims import PRIMS
from ...ir.transforms.ops import DIFFERENTIABLE, inline, zeros
from ...ir.transforms.transpose import transpose
from ...ir.types import TensorType
from ...tracer.dtypes import from_torch

if TYPE_CHECKING:
    from ..specialize.specialization import Specialization

Tangent = tuple[TensorType, str]
"""The type and the name of a tangent."""


def has_transpose(pullback: Graph) -> bool:
    """True if a graph is of primitives alone: one that writes, or calls a library, has no transpose here."""
    return not pullback.mutations and all(PRIMS[v.prim].family != "extern" for v in _every_node(pullback))


def _every_node(graph: Graph) -> Iterator[Value]:
    """The nodes of a graph, and of the bodies of its loops."""
    for value in graph.order():
        yield value
        yield from (v for body in bodies_of(value.params) for v in _every_node(body.graph))


def transpose_to_jvp(
    pullback: Graph,
    name: str,
    residuals: int,
    cotangents: int,
    tangents: Mapping[int, Tangent],
    takes_outputs: bool = False,
) -> Graph:
    """The graph of one tangent per cotangent: None for a cotangent that is no float. Raises NonLinearError.

    residuals, cotangents: how many inputs of `pullback` are these; what it took from outside stands behind them.
    tangents: of the inputs that move, by the number of their gradient among the outputs of `pullback`.
    takes_outputs: the graph takes values like the cotangents as well, between residuals and tangents.
    """
    pullback = pullback.copy()
    likes = pullback.inputs[residuals : residuals + cotangents]
    gradients = {i: g for i in tangents if (g := pullback.outputs[i]) is not None}
    linear = [v.params["index"] for v in likes if v.dtype in DIFFERENTIABLE]
    transposed = transpose(pullback.returning(list(gradients.values())), linear)

    # The inputs of the new graph, in the order in which its caller has the values.
    out = Graph(name)
    fixed = [_same_input(out, v) for v in pullback.inputs[:residuals]]
    if takes_outputs:
        for like in likes:
            out.input(like.aval, f"{like.params['name']}_like")
    moving = {i: out.input(*_as_gradient(tangent, gradients.get(i))) for i, tangent in tangents.items()}
    outside = [_same_input(out, v) for v in pullback.inputs[residuals + cotangents :]]

    # The transposed graph takes what its linear inputs left over, and then one tangent per gradient that there is.
    with building(out):
        integers = [zeros(v.aval) for v in likes if v.dtype not in DIFFERENTIABLE]
        pushed = iter(inline(transposed, [*fixed, *integers, *outside, *(moving[i] for i in gradients)]))
        return out.returning([_or_zeros(next(pushed), v) if v.dtype in DIFFERENTIABLE else None for v in likes])


def _same_input(out: Graph, source: Value) -> Value:
    return out.input(source.aval, source.params["name"], source.params["strides"])


def _as_gradient(tangent: Tangent, gradient: Value | None) -> Tangent:
    """Where a gradient has as many axes as its argument, they are as long, whatever symbols say: by autograd."""
    (aval, name) = tangent
    if gradient is None or gradient.ndim != len(aval.shape):
        return tangent
    return TensorType(gradient.shape, aval.dtype), name


def _or_zeros(tangent: Value | None, like: Value) -> Value:
    return zeros(like.aval) if tangent is None else tangent


def tangent_of(spec: Specialization, argument: int) -> Tangent:
    """The tangent of an argument: of the argument's type."""
    captured = spec.captured
    fake: Any = captured.forward.fakes[captured.slots.index(argument)]
    shape = tuple(n if isinstance(n, int) else n.node.expr for n in fake.shape)
    return TensorType(shape, from_torch(fake.dtype)), f"{captured.names[argument]}_dot"
