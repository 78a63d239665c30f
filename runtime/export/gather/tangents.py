"""The jvp of an exported Function: the user's own, captured, or the user's backward, transposed.

backward: (residuals, g) -> g * w        jvp: (residuals, x_dot) -> x_dot * w
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....ir import Graph, Value
from ....ir.program import ValueRef
from ....ir.transforms.linearity import NonLinearError
from ....tracer.capture.context import BackwardContext
from ....tracer.function import guarded_trace
from ....tracer.methods import as_tuple
from ...capture.captured import name_at
from ...capture.captured_backward import predicted_kinds
from ...capture.guards import is_float
from ...capture.user_methods import ctx_attributes
from ...compiled.compiled import Compiled
from ...execution.graph_to_kernels import graph_of, optimize
from ...functorch.transposed_jvp import has_transpose, tangent_of, transpose_to_jvp
from ...specialize.linearity import require_linear
from ...specialize.specialization import Specialization


class NoTangents(Exception):
    """There is no graph of tangents to write down; the argument says why."""


def moving(spec: Specialization) -> list[int]:
    """The arguments that have a tangent."""
    captured = spec.captured
    pairs = zip(captured.slots, captured.forward.fakes, strict=True)
    return [i for i, fake in pairs if is_float(fake) and i < captured.count]


def output_moves(spec: Specialization) -> list[bool]:
    """Which of the user's outputs have a tangent."""
    captured = spec.captured
    fixed = {p.index for p in captured.forward.non_differentiable if p.kind == "output"}
    there = [is_float(o) and i not in fixed for i, o in enumerate(captured.forward.fake_outputs)]
    supply = iter(there)
    return [o.kind != "object" and next(supply) for o in captured.forward.outputs]


def tangents_of(
    compiler: Compiled, spec: Specialization, backward: Graph | None, kept: Sequence[ValueRef]
) -> tuple[Graph, Sequence[ValueRef]]:
    """(what jvp reads, tangents of the arguments) -> tangents of the outputs; and where it finds what it reads.

    backward: the graph that the file runs, over `kept`. Raises NoTangents, NonLinearBackward, CaptureError.
    """
    if any(o.kind not in ("tensor", "object") for o in spec.captured.forward.outputs):
        raise NoTangents("an output is an argument, or a view of one, and its tangent would have to be one too")
    if compiler.user.overrides("jvp"):
        return _own(spec)
    if backward is None or compiler.options.derive_jvp != "backward":
        raise NoTangents("forward mode is no transpose of a backward here; write a `jvp` staticmethod")
    require_linear(spec, moving(spec))
    return _transposed(spec, backward, len(kept)), kept


# ------------------------------------------------------------------ the user's own
def _own(spec: Specialization) -> tuple[Graph, Sequence[ValueRef]]:
    captured = spec.captured
    forward = captured.forward
    places = [*forward.saved_for_forward, *forward.tensor_attributes.values()]
    present = [p for p in places if p is not None]
    kept = [captured.session.fake_again(f) for p in present if (f := forward.fake_at(p)) is not None]
    arguments = moving(spec)
    likes = [captured.session.fake_like(forward.fakes[captured.slots.index(i)]) for i in arguments]
    trace = guarded_trace(captured.session, _body(spec, places, arguments), [*kept, *likes], captured.reads)
    if trace.lifted or trace.opaque:
        raise NoTangents("jvp reads or calls what is outside")
    trace.names = [*(name_at(captured, place) for place in present), *(f"{captured.names[i]}_dot" for i in arguments)]
    graph = graph_of(trace, f"{captured.name}_jvp")
    moves = [m for m, o in zip(output_moves(spec), forward.outputs, strict=True) if o.kind != "object"]
    graph.outputs = [o for o, m in zip(graph.outputs, moves, strict=True) if m]
    graph.output_strides = [s for s, m in zip(graph.output_strides, moves, strict=True) if m]
    return graph, present


def _body(spec: Specialization, places: Sequence[ValueRef | None], arguments: Sequence[int]) -> Any:
    captured = spec.captured
    present = sum(p is not None for p in places)
    n = len(captured.forward.saved_for_forward)

    def body(*values: Any) -> tuple[Any, ...]:
        supply = iter(values[:present])
        kept = [None if p is None else next(supply) for p in places]
        attributes, needs = ctx_attributes(captured, kept[n:], {}), captured.forward.needs_input_grad
        own = BackwardContext(kept[:n], attributes, needs[: captured.count])
        given = dict(zip(arguments, values[present:], strict=True))
        made = as_tuple(captured.cls.jvp(own, *map(given.get, range(captured.count))))  # type: ignore[attr-defined]
        return tuple(made[i] for i in captured.forward.tensor_outputs)

    return body


# ------------------------------------------------------------------ transposed
def _transposed(spec: Specialization, backward: Graph, kept: int) -> Graph:
    if not has_transpose(backward):
        raise NoTangents("backward calls a library, whose transpose is not written down")
    gradients, tangents = len(backward.inputs) - kept, {i: tangent_of(spec, i) for i in moving(spec)}
    try:
        graph = transpose_to_jvp(backward, f"{spec.captured.name}_jvp", kept, gradients, tangents)
        return optimize(graph.returning(_that_move(spec, [o for o in graph.outputs if o is not None])))
    except NonLinearError as error:
        raise NoTangents(f"backward has no transpose: {error}") from error


def _that_move(spec: Specialization, made: Sequence[Value]) -> list[Value]:
    """Of one tangent per float output with a gradient those of outputs that move."""
    captured = spec.captured
    supply = iter(made)
    kinds = predicted_kinds(captured)
    floats = iter([is_float(f) for f in captured.forward.fake_outputs])
    found = []
    for output, kind, moves in zip(captured.forward.outputs, kinds, output_moves(spec), strict=True):
        if output.kind != "object" and next(floats) and kind is not None:
            tangent = next(supply)
            found += [tangent] if moves else []
    return found
