"""The rules of a specialisation itself, below all batches. The user's own jvp and vmap are used where written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ....tracer.capture.capture import Session, capture_lock, is_capturing
from ....tracer.capture.grad_mode import has_unrecorded
from ....tracer.lowering.functional import without_writes, writes
from ....tracer.torch_private import forward_mode_is_active, no_tracing_functions, plain_tensors
from ....tracer.trace import Trace
from ...capture.captured import CapturedFunction
from ...capture.captured_backward import reduce_to_argument
from ...capture.guards import size_guard
from ...capture.outputs import rebuild_output
from ...capture.user_methods import hidden_of_user, run_user_backward, run_user_forward
from ...specialize.linearity import require_linear
from ...values.sizes import BoundSizes
from .. import vjp_unit  # noqa: F401  units that are derived by it
from ..backward_unit import BackwardUnit
from ..batching.batchable import batchable
from ..graphs import Body, GraphCache
from ..jvp_unit import CallingUnit
from ..results import own_memory
from ..unit import TransformableGraph, report_to
from .function import function_of
from .rules import FunctionRules
from .transposed_backward import TransposedBackward
from .user_jvp import CapturedUserJvp, run_user_jvp
from .user_vmap import call_user_vmap

if TYPE_CHECKING:
    from ...compiled.compiled import Compiled
    from ...specialize.specialization import Specialization

Tensor = torch.Tensor


def functorch_function_of(compiler: Compiled, specialization: Specialization, backend: str) -> Any:
    """The one such Function of a specialisation on a backend."""
    pushed = forward_mode_is_active() and not compiler.user.overrides("jvp")
    copies = pushed and _has_no_place_for_tangents(specialization)
    key = (backend, "whole", copies)
    if key not in specialization.nodes:
        rules = FunctorchFunction(compiler, specialization, backend, copies)
        specialization.nodes.setdefault(key, function_of(rules))
    return specialization.nodes[key]


def _has_no_place_for_tangents(spec: Specialization) -> bool:
    """True if some output is a view, or repeats elements: a tangent that is derived is no such thing."""
    captured = spec.captured
    results = (*captured.forward.fake_outputs, *captured.forward.fake_hidden)
    return bool(captured.skip) or any(isinstance(step, int) and step == 0 for o in results for step in o.stride())


class FunctorchFunction(FunctionRules):
    """copies: whether no result may be a view: autograd lays out a tangent as its primal is."""

    def __init__(self, compiler: Compiled, spec: Specialization, backend: str, copies: bool) -> None:
        captured = spec.captured
        super().__init__(compiler, spec)
        self.backend, self.copies = backend, copies
        self.written, self.pure = captured.written_inputs, _pure(spec)
        name, reads = captured.name, captured.reads
        graphs = _ForwardGraphs(spec, f"{name}_forward", self._forward_body, backend)
        self.forward_unit = TransformableGraph(f"{name}_forward", self._forward_body, backend, reads, graphs)
        self.pushed_unit = self.forward_unit
        if captured.forward.trace.inlines:  # their own rules are gone from the graph, so that the method runs again
            self.pushed_unit = CallingUnit(f"{captured.name}_forward", self._forward_again, backend, captured.reads)
        self.setup_unit = TransformableGraph(f"{name}_setup_context", self._setup_body, backend, reads)
        for unit in (self.forward_unit, self.pushed_unit, self.setup_unit):
            report_to(compiler, unit)
        self.tangent_units: dict[tuple[bool, ...], TransposedBackward] = {}
        self.captured_jvps: dict[tuple[bool, ...], TransformableGraph] = {}
        self.proved_linear: set[Any] = set()

    # ------------------------------------------------------------------ forward
    def run_forward(self, args: Sequence[Any]) -> tuple[Any, ...]:
        captured = self.spec.captured
        tensors = captured.tensors_of(args)
        if captured.writes_shared_memory(tensors):
            return tuple(run_user_forward(captured, args))
        if is_capturing():
            results = self._forward_body(*tensors)[: self.outputs.total]
            return tuple(o if o._base is None else o.clone() for o in results)
        outputs, hidden = self.spec.run_forward(args, self.backend)
        outputs = [o if i in captured.skip or o._base is None else o.data for i, o in enumerate(outputs)]
        if self.copies:
            dirty = {i for i, _ in self.outputs.written}
            outputs = [o.clone() if i in captured.skip - dirty else o for i, o in enumerate(outputs)]
            outputs = [o if i in dirty else own_memory(o) for i, o in enumerate(outputs)]
            hidden = [own_memory(h) for h in hidden]
        return (*self.outputs.as_views(outputs, tensors), *hidden)

    def sizes_of(self, inputs: Sequence[Any]) -> dict[Any, int]:
        return self.spec.captured.binder(inputs)

    def _forward_body(self, *tensors: Any) -> Sequence[Any]:
        """The captured forward as a body: derivatives of hidden values are taken of it."""
        lifted = [r.get() for r in self.spec.captured.lifted if r is not None]
        return tuple(batchable(self.pure)(*tensors, *lifted))

    def _forward_again(self, *tensors: Any) -> Sequence[Any]:
        """The user's forward itself, over the same arguments."""
        copies = [t.clone() if i in self.written else t for i, t in enumerate(tensors)]
        results = run_user_forward(self.spec.captured, self.spec.captured.with_tensors(copies))
        return (*results, *(copies[i] for i in self.written))

    def _setup_body(self, *tensors: Any) -> Sequence[Any]:
        """setup_context alone: the values that it keeps, of the tensor arguments and outputs."""
        captured = self.spec.captured
        inputs, outputs = tensors[: len(captured.slots)], tensors[len(captured.slots) :]
        output = rebuild_output(captured, outputs, inputs, (), captured.binder(inputs))
        return hidden_of_user(captured, captured.with_tensors(inputs), output)

    # ------------------------------------------------------------------ derivatives
    def backward_for(self, gradients: Sequence[Any]) -> TransformableGraph:
        return BackwardUnit.of(self.compiler, self.spec, self.backend)

    def backward_as_written(
        self, residuals: Sequence[Any], sizes: Sequence[Any], gradients: Sequence[Any]
    ) -> Sequence[Any]:
        bound = BoundSizes(zip(self.symbols, sizes, strict=True))
        results = run_user_backward(self.spec.captured, residuals, bound, gradients)
        return [reduce_to_argument(self.spec.captured, i, g, bound) for i, g in enumerate(results)]

    def tangent_unit(self, mask: tuple[bool, ...]) -> TransformableGraph:
        self._require_linear(mask)
        if mask not in self.tangent_units:
            facts = (self.compiler, self.spec, self.outputs, self.symbols, mask, self.backend)
            self.tangent_units.setdefault(mask, TransposedBackward(*facts))
        return self.tangent_units[mask]

    def _require_linear(self, mask: tuple[bool, ...]) -> None:
        """backward has to be linear, with the present values of all that it reads from outside."""
        key = (mask, self.spec.captured.reads.facts())
        if key not in self.proved_linear:
            require_linear(self.spec, [i for i, moves in enumerate(mask) if moves])
            self.proved_linear.add(key)

    # ------------------------------------------------------------------ the user's own rules
    def user_jvp(self, saved: Sequence[Any], sizes: Any, tangents: Sequence[Any], captured: bool) -> tuple[Any, ...]:
        if not (captured or self.compiler.ledger.must_capture("jvp")) or self.spec.captured.writes_inputs:
            return run_user_jvp(self.compiler.user.cls, self.spec, saved, sizes, tangents)
        mask = tuple(t is not None for t in tangents)
        numbers = [sizes[s] for s in self.symbols]
        return tuple(self.captured_jvp(mask, len(saved))(*saved, *numbers, *[t for t in tangents if t is not None]))

    def captured_jvp(self, mask: tuple[bool, ...], saved: int) -> TransformableGraph:
        """The unit of the user's jvp, where these arguments move."""
        if mask not in self.captured_jvps:
            middle = saved + len(self.symbols)

            def body(*args: Any) -> Sequence[Any]:
                supply = iter(args[middle:])
                sizes = dict(zip(self.symbols, args[saved:middle], strict=True))
                tangents = [next(supply) if moves else None for moves in mask]
                return run_user_jvp(self.compiler.user.cls, self.spec, args[:saved], sizes, tangents)

            self.captured_jvps.setdefault(mask, CapturedUserJvp(self.compiler, body, self.backend))
        return self.captured_jvps[mask]

    def user_vmap(self, info: Any, in_dims: Any, args: Sequence[Any]) -> Any:
        """Old-style forwards run again for the values that are kept besides, setup_context alone in the other style."""
        tensors = self.spec.captured.tensors_of(args)
        dims = tuple(in_dims[i] for i in self.spec.captured.slots)

        def hidden(outputs: Sequence[Any], out_dims: Sequence[Any]) -> Sequence[Any]:
            if not self.outputs.has_hidden:
                return ()
            if not self.compiler.user.setup_style:
                results = self.forward_unit.batch(dims, info.randomness)(*tensors)
                return results[self.outputs.count : self.outputs.total]
            return self.setup_unit.batch((*dims, *out_dims), info.randomness)(*tensors, *outputs)

        return call_user_vmap(self.compiler.user.cls, self.spec, self.outputs, info, in_dims, tensors, hidden)


class _ForwardGraphs(GraphCache):
    """The graphs of the captured forward: the trace of the specialisation itself, wherever that serves.

    Where it does not, its graph is traced once more: without the writes, which no batch and no derivative may make;
    without opaque calls, which are played back; for other sizes than those of its session. A derivative is traced
    through autograd, from this graph, and a batch is made of it. A call whose `needs_input_grad` or constants differ
    is another specialisation, with a trace of its own. The user's backward is traced once more for a batch of it:
    what runs at first order is one graph per layout of the gradients, and takes no sizes as numbers, as units do.
    """

    def __init__(self, spec: Specialization, name: str, body: Body, backend: str) -> None:
        super().__init__(name, body, backend, spec.captured.reads)
        self.captured = spec.captured

    def trace(self, args: Sequence[Any], dynamic: bool = True) -> tuple[Session, Trace]:
        captured, trace = self.captured, self.captured.forward.trace
        if not (_is_shareable(captured) and size_guard(captured.session, trace.fakes)(args)):
            return super().trace(args, dynamic)
        lifted = [read.get() for read in captured.lifted if read is not None]  # as they are by now
        return captured.session, replace(trace, lifted=lifted)


def _is_shareable(captured: CapturedFunction) -> bool:
    trace = captured.forward.trace
    if trace.opaque or captured.returns_input_memory or len(captured.lifted) != len(trace.lifted):
        return False
    if any(hasattr(node.target, "fusegrad_call") for node in trace.graph_module.graph.nodes):
        return False  # compiled code behind a node, which no transform may meet: its operations are traced instead
    return not (writes(trace.graph_module) or has_unrecorded(trace.graph_module) or None in captured.lifted)


def _pure(spec: Specialization) -> torch.fx.GraphModule:
    """The captured forward without writes, and with the new values of arguments that it writes to."""
    captured = spec.captured
    trace = captured.forward.trace
    if not writes(trace.graph_module):
        return trace.graph_module
    with capture_lock, no_tracing_functions(), plain_tensors(), torch.no_grad():
        return without_writes(captured.forward.session, trace, captured.written_inputs)
