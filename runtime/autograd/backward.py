"""backward of a generated Function: what is compiled, what autograd has to differentiate, or the user's own body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...ir.errors import users_line
from ...tracer.capture.capture import OpaqueCallError, is_capturing
from ...tracer.torch_private import has_tangent, is_batched, saved_tensors_of, transforms_active
from ...tracer.trace import CaptureError
from ..capture.ctx_attributes import REASON, is_changed
from ..capture.guards import is_tracked
from ..compiled.backward import guard_failure, opaque_calls, require_transposed, run_backward
from ..fallback.answer import Fault, backward_failed, is_fault, recorded_faults, users_backward
from ..fallback.records import Record, warn
from ..functorch.backward_unit import BackwardUnit
from ..settings.config import taken_over
from ..settings.counters import count
from ..specialize.comparisons import backend_apart
from ..specialize.compiled_backward import BackwardCall, is_apart
from ..specialize.residuals import ResidualPlan
from ..specialize.specialization import Specialization
from .opaque_forward import WRITES_GIVEN
from .saved_lists import kept_by

if TYPE_CHECKING:
    from ..compiled.compiled import Compiled

ASSIGNED = "attributes of grad_fn"


def backward(
    compiler: Compiled,
    spec: Specialization,
    backend: str,
    chosen: ResidualPlan | None,
    ctx: Any,
    gradients: Sequence[Any],
) -> Any:
    """backward of a generated Function: kernels, or the user's own body with the reason on record."""
    with taken_over(ctx._fusegrad_patch):  # autograd runs this in a thread of the device's
        residuals = [*_unpacked(spec, chosen, ctx), *ctx._fusegrad_tensors]
        call = BackwardCall(backend, residuals, ctx._fusegrad_sizes, gradients, chosen, ctx)
        try:
            return _differentiated(compiler, spec, call)
        except Exception as error:
            if not is_fault(error):
                raise
            fault = Fault.of(error)
        results = as_written(compiler, spec, call)
        backward_failed(compiler, spec, fault, gradients)
        return results


def as_written(compiler: Compiled, spec: Specialization, call: BackwardCall) -> Any:
    """The user's own backward, followed by autograd where it is."""
    return users_backward(compiler, spec, call.chosen, call.ctx, call.residuals, call.gradients)


def _differentiated(compiler: Compiled, spec: Specialization, call: BackwardCall) -> Any:
    require_transposed(compiler, spec)
    if spec.backward.faulty or _changed_since_forward(compiler, spec, call):
        return as_written(compiler, spec, call)
    if is_changed(call.ctx, spec.captured):
        _record_assigned(compiler)
        return as_written(compiler, spec, _followed(call))
    tensors = (*call.residuals, *call.gradients)
    in_a_batch = any(map(is_batched, call.gradients))
    traced = is_capturing()  # by another mode: no capture may begin, and none is refused for good
    if traced:
        compiler.ledger.note_observed()
    is_recorded = (torch.is_grad_enabled() and any(map(is_tracked, tensors))) or any(map(has_tangent, tensors))
    if is_recorded or in_a_batch or traced or transforms_active():
        return _derivative(compiler, spec, call, in_a_batch or traced)
    results = run_backward(compiler, spec, call)
    if (learn := getattr(type(call.ctx), "_fusegrad_learns", None)) is not None:
        with recorded_faults(compiler, "backward", call.gradients):
            learn(call.residuals, call.gradients)
    return results


def _derivative(compiler: Compiled, spec: Specialization, call: BackwardCall, in_a_transform: bool) -> Any:
    """backward where something differentiates or batches it: by its graph, or by the user's own operations."""
    followed = _followed(call)
    opaque = compiler.ledger.records.get("backward", Record("")).status == "opaque"
    if in_a_transform or opaque or compiler.ledger.is_in_anomaly_mode() or is_apart(spec.backward):
        return as_written(compiler, spec, followed)
    if (why := guard_failure(spec.captured, call)) is not None:
        compiler.ledger.refuse("backward", CaptureError(reason=why, where=spec.captured.backward_place()))
        return as_written(compiler, spec, followed)
    if not (transforms_active() or _is_captured(compiler, spec, call)):
        return as_written(compiler, spec, followed)
    unit = BackwardUnit.of(compiler, spec, backend_apart(spec, call.backend))
    return unit.differentiable(followed.residuals, call.sizes, call.gradients)


def _followed(call: BackwardCall) -> BackwardCall:
    """The call on the user's own residuals, with their history where autograd follows them."""
    if call.chosen is None:
        return call
    return replace(call, residuals=call.chosen.originals(call.residuals, call.ctx), chosen=None)


def _is_captured(compiler: Compiled, spec: Specialization, call: BackwardCall) -> bool:
    """True if there is one graph for these gradients. Where there is none that is on record before anything runs:
    a derivative would run it again, and it may have effects, or draw."""
    try:
        entry = spec.backward.entry(call.kinds)
    except OpaqueCallError as error:
        compiler.ledger.refuse_derivative(error)
        return False
    except CaptureError as error:
        if compiler.keys.take_out("backward", error):
            spec.adopt(compiler.user.cls, compiler.keys.reads_now())
            return _is_captured(compiler, spec, call)
        compiler.ledger.refuse("backward", error)
        return False
    for opaque in opaque_calls(entry):
        compiler.ledger.refuse_derivative(CaptureError(reason=opaque.reason_of_method, where=opaque.where))
    if entry.written_inputs:  # a derivative would compute it again, on what is in that memory by then
        compiler.ledger.refuse_derivative(CaptureError(reason=WRITES_GIVEN, where=spec.captured.backward_place()))
    return not (entry.opaque or entry.written_inputs)


def _changed_since_forward(compiler: Compiled, spec: Specialization, call: BackwardCall) -> bool:
    """True if the caller changed objects on ctx since forward: on record."""
    sharing = spec.captured.sharing
    if sharing is None or (name := sharing.changed_attribute(call.ctx._fusegrad_shared)) is None:
        return False
    reason = f"what `ctx.{name}` shares with the caller changed after forward"
    compiler.ledger.refuse("backward", CaptureError(reason=reason, where=spec.captured.backward_place()))
    return True


def _record_assigned(compiler: Compiled) -> None:
    """A ctx that was written to from outside: on record, once."""
    records = compiler.ledger.records
    if ASSIGNED not in records and records.get("backward", Record("")).status != "opaque":
        records[ASSIGNED] = record = Record("opaque", REASON, users_line())
        count("fallbacks")
        warn(f"{compiler.user.cls.__name__}.backward falls back to eager: {REASON} [{record.code}]")


def _unpacked(spec: Specialization, chosen: ResidualPlan | None, ctx: Any) -> tuple[Any, ...]:
    """The saved tensors of the node. Where it saved none it is not asked: it would raise once it was freed."""
    if not (spec.captured.forward.saved if chosen is None else chosen.places):
        return ()
    if spec.captured.forward.stacks:
        return kept_by(ctx, spec.captured)
    return ctx.saved_tensors if chosen is None else saved_tensors_of(ctx)
