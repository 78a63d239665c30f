"""Tangents of a unit's outputs for kernels: its vjp, as autograd derives it, transposed in the cotangents by the IR.

Half of what differentiating the vjp once more costs to capture, the same linear map, in the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...ir import Graph, Value, building
from ...ir.prims import PRIMS
from ...ir.text.text import symbols_of
from ...ir.transforms.linearity import NonLinearError
from ...ir.transforms.ops import inline, zeros
from ...ir.transforms.transpose import transpose
from ...ir.types import TensorType
from ...tracer.capture.capture import is_capturing
from ...tracer.capture.grad_mode import has_unrecorded
from ...tracer.function import rebind
from ...tracer.torch_private import plain_tensors
from ...tracer.trace import CaptureError
from ..capture.guards import is_float
from ..execution.executable import Executable
from ..execution.pipeline import optimize
from ..settings.config import KERNEL_BACKENDS
from ..values.sizes import BoundSizes
from .batching.ir_rules import Lowered
from .jvp import jvp_of
from .unit import VALUES, TransformableGraph, derivations

Tensor = torch.Tensor


class CallingUnit(TransformableGraph):
    """A method that calls other Functions: its forward mode goes by theirs, which no transposed vjp knows of."""


class PushedUnit(TransformableGraph):
    """(inputs, tangents) -> tangents of the outputs."""

    def __init__(self, parent: TransformableGraph, inputs: int) -> None:
        self.parent, self.count = parent, inputs
        self.transposed: dict[tuple[int, tuple[bool, ...]], Lowered | None] = {}  # by the graph of the vjp, what moves
        calls = isinstance(parent, CallingUnit)
        body = lambda *a: jvp_of(parent.body, a[:inputs], a[inputs:], calls)  # noqa: E731
        super().__init__(f"{parent.name}_jvp", body, parent.backend, parent.reads)

    def execute(self, args: Sequence[Any]) -> Sequence[Any]:
        in_ir = None if is_capturing() or self.backend not in KERNEL_BACKENDS else self._transposed_for(args)
        found = None if in_ir is None else self.run_in_ir(args)
        return super().execute(args) if found is None else found

    def lowered(self, args: Sequence[Any]) -> tuple[Lowered | None, Sequence[Tensor]]:
        found = self._transposed_for(args) if self.backend in KERNEL_BACKENDS else None
        return super().lowered(args) if found is None else found

    def _transposed_for(self, args: Sequence[Any]) -> tuple[Lowered, Sequence[Tensor]] | None:
        """The transposed vjp for these arguments; None where autograd has to."""
        if isinstance(self.parent, CallingUnit):
            return None
        inputs, tangents = args[: self.count], args[self.count :]
        moving = tuple(t is not None and is_float(x) for x, t in zip(inputs, tangents, strict=True))
        if not all(t is None or m for t, m in zip(tangents, moving, strict=True)) or not any(moving):
            return None
        try:
            with plain_tensors(), torch.no_grad():
                captured = self.parent.captured(inputs)[0]
                if has_unrecorded(captured.trace.graph_module):
                    return None
                cotangents = _outputs_like(captured, inputs)
                pulled, lifted = self.parent.vjp(self.count, moving).lowered([*inputs, *cotangents])
        except CaptureError:
            return None
        if pulled is None or not all(t.is_contiguous() for t in tangents if t is not None):
            return None
        key = (id(pulled), moving)
        if key not in self.transposed:
            self.transposed[key] = self._transpose(pulled, inputs, cotangents, moving)
        found = self.transposed[key]
        return None if found is None else (found, lifted)

    def _transpose(
        self, pulled: Lowered, inputs: Sequence[Any], cotangents: Sequence[Any], moving: Sequence[bool]
    ) -> Lowered | None:
        live = sum(isinstance(a, VALUES) for a in inputs)
        sources = {s: source for s, source in pulled.sources.items() if source[0] < live}
        tensors = [i for i, a in enumerate(inputs) if isinstance(a, Tensor)]
        moved = [(i, at) for at, i in enumerate(tensors) if moving[i]]
        if not _is_pure(pulled.graph):
            return None
        try:
            graph = optimize(_pushing(pulled.graph, len(tensors), cotangents, moved))
        except NonLinearError:
            return None
        if not _symbols(graph) <= set(sources):
            return None
        axes: list[Any] = [None] * (live + sum(moving))
        return Lowered(pulled.trace, graph, axes, sources, self.name, self.backend, tells=False)


def _outputs_like(executable: Executable, inputs: Sequence[Any]) -> list[Any]:
    """Memory like the outputs that may move; None for the rest."""
    sizes = executable.binder([a for a in inputs if isinstance(a, VALUES)])
    (made,) = executable.trace.graph_module.graph.find_nodes(op="output")[0].args
    return [None if node is None else _like(node.meta["val"], sizes) for node in made]


def _like(fake: Any, sizes: BoundSizes) -> Tensor | None:
    return torch.empty(rebind(fake.shape, sizes), dtype=fake.dtype, device=fake.device) if is_float(fake) else None


def _is_pure(graph: Graph) -> bool:
    return not graph.mutations and all(PRIMS[v.prim].family not in ("extern", "pick") for v in graph.order())


def _symbols(graph: Graph) -> set[Any]:
    avals = {s for v in graph for t in v.avals for s in symbols_of(t)}
    return avals | {s for v in graph for p in v.params.values() for s in symbols_of(p)}


def _pushing(pulled: Graph, first: int, cotangents: Sequence[Any], moved: Sequence[tuple[int, int]]) -> Graph:
    """The transposed graph over the tensors of (inputs, tangents that are there), and what was taken from outside.

    first: how many tensors there are among the inputs. moved: (number among the inputs, among their tensors) of each
    tangent.
    """
    graph = pulled.copy()
    likes = graph.inputs[first : first + sum(c is not None for c in cotangents)]
    results = [graph.outputs[i] for i, _ in moved]
    graph.returning([r for r in results if r is not None])
    transposed = transpose(graph, [v.params["index"] for v in likes])
    out = Graph(f"{pulled.name}_transposed")
    kept = [_again(out, v) for v in graph.inputs[:first]]
    tangents = [out.input(kept[at].aval, f"{kept[at].params['name']}_dot") for _, at in moved]
    lifted = [_again(out, v) for v in graph.inputs[first + len(likes) :]]
    given = [t for t, r in zip(tangents, results, strict=True) if r is not None]
    with building(out):
        found = inline(transposed, [*kept, *lifted, *given])
        pushed = iter([v.aval if p is None else p for v, p in zip(likes, found, strict=True)])
        return out.returning([None if c is None else _or_zeros(next(pushed)) for c in cotangents])


def _again(out: Graph, source: Value) -> Value:
    return out.input(source.aval, source.params["name"], source.params["strides"])


def _or_zeros(tangent: Value | TensorType) -> Value:
    return tangent if isinstance(tangent, Value) else zeros(tangent)


derivations["jvp"] = PushedUnit
