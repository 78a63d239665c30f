"""Forward mode by the user's backward, which is linear in its gradients: its transpose gives the tangents.

    backward: (residuals, g) -> g * w        tangents: (residuals, x_dot) -> x_dot * w

A custom gradient is honoured here too. For kernels the captured backward is transposed in the IR; elsewhere, and where
it is not of primitives alone, autograd does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ....ir.errors import LoweringError
from ....ir.transforms.linearity import NonLinearError
from ....tracer.capture.capture import Session, capture_lock, is_capturing
from ....tracer.torch_private import plain_tensors
from ....tracer.trace import Trace
from ...capture.captured import present_residuals
from ...capture.captured_backward import gradients_per_output, predicted_kinds, reduce_to_argument
from ...capture.guards import is_float
from ...capture.user_methods import run_user_backward
from ...execution.aten import reference
from ...execution.graph_to_kernels import graph_of, optimize
from ...settings.config import KERNEL_BACKENDS
from ...specialize.linearity import CoarsestEps, IgnoreDetach, NonLinearBackward, not_transposed, probe_tensor
from ...values.sizes import BoundSizes, numbers
from ..batching.ir_rules import Lowered
from ..graphs import GraphCache, present
from ..transposed_jvp import has_transpose, tangent_of, transpose_to_jvp
from ..unit import TransformableGraph, report_to, run_in_ir
from ..vjp import transposed
from .user_outputs import UserOutputs

if TYPE_CHECKING:
    from ...capture.captured_backward import BackwardEntry
    from ...compiled.compiled import Compiled
    from ...specialize.specialization import Specialization

Tensor = torch.Tensor
Mask = tuple[bool, ...]


class TransposedBackward(TransformableGraph):
    """(residuals, sizes, outputs, tangents of the arguments in `mask`) -> tangents of the outputs.

    The first results are compared with backward itself.
    """

    def __init__(
        self, compiler: Compiled, spec: Specialization, outputs: UserOutputs, symbols: Sequence[Any], mask: Mask,
        backend: str,
    ) -> None:  # fmt: skip
        self.spec, self.outputs, self.symbols, self.mask = spec, outputs, symbols, mask
        self.transposed: dict[int, Lowered | None] = {}  # by the entry
        name, reads = f"{spec.captured.name}_jvp", spec.captured.reads
        super().__init__(name, self._by_autograd, backend, reads, _ExaminedGraphs(self, name, backend))
        report_to(compiler, self)

    def parts(self, args: Sequence[Any]) -> tuple[Sequence[Any], dict[Any, Any], Sequence[Any], Sequence[Any]]:
        """(residuals, sizes, outputs, tangents) of the unit's arguments."""
        first = len(self.spec.captured.residual_places)
        second = first + len(self.symbols)
        third = second + self.outputs.count
        return args[:first], dict(zip(self.symbols, args[first:second], strict=True)), args[second:third], args[third:]

    def _by_autograd(self, *args: Any) -> Sequence[Any]:
        residuals, sizes, outputs, present_tangents = self.parts(args)
        supply = iter(present_tangents)
        tangents = [next(supply) if moves else None for moves in self.mask]
        return _transposed_by_autograd(self.spec, residuals, sizes, outputs, tangents)

    def execute(self, args: Sequence[Any]) -> Sequence[Any]:
        if not is_capturing() and self._entry_for(args) is not None:
            results = run_in_ir(self, args)
            if results is not None:
                return results
        return super().execute(args)

    def lowered(self, args: Sequence[Any]) -> tuple[Lowered | None, Sequence[Any]]:
        entry = self._entry_for(args)
        if entry is None:
            return super().lowered(args)
        return self.transposed[id(entry)], [read.get() for read in entry.lifted if read is not None]

    def _entry_for(self, args: Sequence[Any]) -> BackwardEntry | None:
        """The captured backward to transpose for these arguments; None where autograd has to."""
        spec, kinds = self.spec, predicted_kinds(self.spec.captured)
        if self.backend not in KERNEL_BACKENDS or sum(map(bool, kinds)) != self.outputs.count:
            return None
        _, sizes, outputs, tangents = self.parts(args)
        entry = spec.backward.entry(kinds)
        if id(entry) not in self.transposed:
            with plain_tensors(), torch.no_grad(), capture_lock:
                self._transpose(args, entry)
        graph = self.transposed[id(entry)]
        if graph is None or not all(t.is_contiguous() for t in (*tangents, *outputs)):
            return None
        is_right = entry.admits(BoundSizes(sizes)) and self._are_as_gradients(graph, tangents, sizes)
        return entry if is_right else None

    def _are_as_gradients(self, graph: Lowered, tangents: Sequence[Tensor], sizes: Mapping[Any, int]) -> bool:
        """The tangents are as long as the gradients that backward returns."""
        first = len(present_residuals(self.spec.captured)) + len(self.spec.captured.forward.tensor_outputs)
        shapes = [v.shape for v in graph.graph.inputs[first : first + len(tangents)]]
        return all(tuple(t.shape) == numbers(s, sizes) for t, s in zip(tangents, shapes, strict=True))

    def _transpose(self, args: Sequence[Any], entry: BackwardEntry) -> None:
        if id(entry) in self.transposed:  # another thread was first
            return
        graph = self.transposed[id(entry)] = self._transposed(entry)
        if graph is None:
            return
        # The first results, through torch.
        lifted = [read.get() for read in entry.lifted if read is not None]
        tensors = [a for a in (*args, *lifted) if isinstance(a, Tensor)]
        sizes = graph.sizes([args[i] for i in present(args)])
        self.examine(args, reference.run(graph.graph, tensors, sizes))

    def _transposed(self, entry: BackwardEntry) -> Lowered | None:
        """None where the graph is not of primitives alone, or leaves out what an argument would contribute."""
        captured = self.spec.captured
        moving = [i for i, moves in enumerate(self.mask) if moves]
        try:
            backward = graph_of(entry.trace, f"{captured.name}_backward")
        except LoweringError:
            return None
        entry.assume(captured.session.conditions(captured.symbols, entry.since))
        if not has_transpose(backward) or not all(captured.forward.needs_input_grad[i] for i in moving):
            return None
        first, outputs = len(present_residuals(captured)), len(captured.forward.tensor_outputs)
        tangents = {i: tangent_of(self.spec, i) for i in moving}
        try:
            graph = transpose_to_jvp(backward, f"{backward.name}_transposed", first, outputs, tangents, True)
        except NonLinearError:
            return None
        values = first + len(self.symbols) + outputs + len(moving)
        sources = {s: (first + at, "value", 0) for at, s in enumerate(self.symbols)}
        axes: list[Any] = [None] * values
        return Lowered(entry.trace, optimize(graph), axes, sources, self.name, self.backend, tells=False)

    def examine(self, args: Sequence[Any], pushed: Sequence[Any]) -> None:
        """Raise NonLinearBackward unless <jvp(t), g> == <t, backward(g)>, by the values of a first call.

        A Function that backward calls may have another derivative than its own, and transposing goes by that.
        """
        captured = self.spec.captured
        residuals, sizes, outputs, tangents = self.parts(args)
        fixed = self.outputs.fixed
        probes = [torch.zeros_like(o) if i in fixed else probe_tensor(o) for i, o in enumerate(outputs)]
        with torch.no_grad():
            with CoarsestEps() as noted:
                gradients = _gradients(self.spec, residuals, BoundSizes(sizes), probes)
            pulled = [g for g, moves in zip(gradients, self.mask, strict=True) if moves]
            why = not_transposed(list(pushed), probes, list(tangents), pulled, noted.coarsest)
        if why is not None:
            raise NonLinearBackward(function=captured.name, why=why, where=captured.backward_place())


class _ExaminedGraphs(GraphCache):
    """Graphs of a transposed backward: the first results of each are compared with backward itself."""

    def __init__(self, unit: TransposedBackward, name: str, backend: str) -> None:
        super().__init__(name, unit._by_autograd, backend, unit.spec.captured.reads)
        self.unit = unit

    def check(self, session: Session, trace: Trace, args: Sequence[Any]) -> None:
        self.unit.examine(args, self.body(*args))


def _gradients(spec: Specialization, residuals: Sequence[Any], sizes: BoundSizes, probes: Sequence[Any]) -> list[Any]:
    """The user's backward, one gradient per argument."""
    results = run_user_backward(spec.captured, residuals, sizes, gradients_per_output(spec.captured, probes))
    return [reduce_to_argument(spec.captured, i, g, sizes) for i, g in enumerate(results)]


def _transposed_by_autograd(
    spec: Specialization, residuals: Sequence[Any], sizes: Any, outputs: Sequence[Any], tangents: Sequence[Any]
) -> Sequence[Any]:
    """backward is linear in its gradients; its transpose takes input tangents to output tangents."""
    captured = spec.captured
    with torch.enable_grad():
        # backward at probes, whatever their values: it is their history that is transposed.
        probes = [torch.zeros_like(o).requires_grad_(is_float(o)) for o in outputs]
        with IgnoreDetach(probes):
            cotangents = gradients_per_output(captured, probes)
            gradients = run_user_backward(captured, residuals, sizes, cotangents, attached=True)
        pulled = [reduce_to_argument(captured, i, g, sizes) for i, g in enumerate(gradients)]
        return transposed(probes, pulled, tangents, outputs)
