"""Tangents of a unit's outputs for kernels: its vjp, as autograd derives it, transposed in the cotangents by the IR.

Half of what differentiating the vjp once more costs to capture, the same linear map, in the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...ir import Graph
from ...ir.text.text import symbols_of
from ...ir.transforms.linearity import NonLinearError
from ...tracer.capture.capture import is_capturing
from ...tracer.capture.grad_mode import has_unrecorded
from ...tracer.function import rebind
from ...tracer.torch_private import plain_tensors
from ...tracer.trace import CaptureError
from ..capture.guards import is_float
from ..execution.executable import Executable
from ..execution.graph_to_kernels import optimize
from ..settings.config import KERNEL_BACKENDS
from ..values.sizes import BoundSizes
from .batching.ir_rules import Lowered
from .graphs import present
from .jvp import jvp_of
from .transposed_jvp import has_transpose, transpose_to_jvp
from .unit import TransformableGraph, derivations, run_in_ir

Tensor = torch.Tensor


class CallingUnit(TransformableGraph):
    """A method that calls other Functions: its forward mode goes by theirs, which no transposed vjp knows of."""


class JvpUnit(TransformableGraph):
    """(inputs, tangents) -> tangents of the outputs."""

    def __init__(self, parent: TransformableGraph, inputs: int) -> None:
        self.parent, self.count = parent, inputs
        self.transposed: dict[tuple[int, tuple[bool, ...]], Lowered | None] = {}  # by the graph of the vjp, what moves
        calls = isinstance(parent, CallingUnit)

        def body(*args: Any) -> Sequence[Any]:
            return jvp_of(parent.body, args[:inputs], args[inputs:], calls)

        super().__init__(f"{parent.name}_jvp", body, parent.backend, parent.reads)

    def execute(self, args: Sequence[Any]) -> Sequence[Any]:
        in_ir = None if is_capturing() or self.backend not in KERNEL_BACKENDS else self._transposed_for(args)
        results = None if in_ir is None else run_in_ir(self, args)
        return super().execute(args) if results is None else results

    def lowered(self, args: Sequence[Any]) -> tuple[Lowered | None, Sequence[Tensor]]:
        graph = self._transposed_for(args) if self.backend in KERNEL_BACKENDS else None
        return super().lowered(args) if graph is None else graph

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
        graph = self.transposed[key]
        return None if graph is None else (graph, lifted)

    def _transpose(
        self, pulled: Lowered, inputs: Sequence[Any], cotangents: Sequence[Any], moving: Sequence[bool]
    ) -> Lowered | None:
        live = len(present(inputs))
        sources = {s: source for s, source in pulled.sources.items() if source[0] < live}
        if not has_transpose(pulled.graph):
            return None
        try:
            graph = optimize(_pushing(pulled.graph, inputs, cotangents, moving))
        except NonLinearError:
            return None
        if not symbols_in_types(graph) <= set(sources):
            return None
        axes: list[Any] = [None] * (live + sum(moving))
        return Lowered(pulled.trace, graph, axes, sources, self.name, self.backend, tells=False)


def _pushing(pulled: Graph, inputs: Sequence[Any], cotangents: Sequence[Any], moving: Sequence[bool]) -> Graph:
    """The transposed graph over the tensors of (inputs, tangents that are there), and what was taken from outside."""
    tensors = [i for i, a in enumerate(inputs) if isinstance(a, Tensor)]
    primals = {i: v for i, v in zip(tensors, pulled.inputs, strict=False) if moving[i]}
    tangents = {i: (v.aval, f"{v.params['name']}_dot") for i, v in primals.items()}
    likes = sum(c is not None for c in cotangents)
    graph = transpose_to_jvp(pulled, f"{pulled.name}_transposed", len(tensors), likes, tangents)
    pushed = iter(graph.outputs)
    return graph.returning([None if c is None else next(pushed) for c in cotangents])


def _outputs_like(executable: Executable, inputs: Sequence[Any]) -> list[Any]:
    """Memory like the outputs that may move; None for the rest."""
    sizes = executable.binder([inputs[i] for i in present(inputs)])
    (outputs,) = executable.trace.graph_module.graph.find_nodes(op="output")[0].args
    return [None if node is None else _like(node.meta["val"], sizes) for node in outputs]


def _like(fake: Any, sizes: BoundSizes) -> Tensor | None:
    return torch.empty(rebind(fake.shape, sizes), dtype=fake.dtype, device=fake.device) if is_float(fake) else None


def symbols_in_types(graph: Graph) -> set[Any]:
    """The symbols of a graph's sizes."""
    avals = {s for v in graph for t in v.avals for s in symbols_of(t)}
    return avals | {s for v in graph for p in v.params.values() for s in symbols_of(p)}


derivations["jvp"] = JvpUnit
