"""backward of a generated Function: what is compiled, what autograd has to differentiate, or the user's own body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...ir.errors import users_line
from ...tracer.capture.capture import OpaqueMet, is_capturing
from ...tracer.torch_private import has_tangent, is_batched, saved_tensors_of, transforms_active
from ...tracer.trace import CaptureError
from ..capture.ctx_attributes import REASON, is_assigned
from ..capture.guards import is_tracked
from ..fallback.answer import Fault, backward_failed, contained, is_fault, users_backward
from ..functorch.unit import BackwardUnit
from ..settings.config import taken_over
from ..settings.counters import count
from ..specialize.backward import opaque_calls, run_backward, unasked_of
from ..specialize.records import Record, warn
from ..specialize.residuals import Chosen
from ..specialize.specialization import Specialization, gradient_kind, in_a_class
from .opaque_forward import WRITES_GIVEN

if TYPE_CHECKING:
    from ..specialize.compiled import Compiled

ASSIGNED = "attributes of grad_fn"


def backward(
    compiler: Compiled,
    specialization: Specialization,
    backend: str,
    chosen: Chosen | None,
    ctx: Any,
    gradients: Sequence[Any],
) -> Any:
    """backward of a generated Function: kernels, or the user's own body with the reason on record."""
    with taken_over(ctx._fusegrad_patch):  # autograd runs this in a thread of the device's
        return _backward(compiler, specialization, backend, chosen, ctx, gradients)


def _backward(
    compiler: Compiled, specialization: Specialization, backend: str, chosen: Chosen | None, ctx: Any, gradients: Any
) -> Any:
    residuals = [*_unpacked(specialization, chosen, ctx), *ctx._fusegrad_tensors]
    try:
        return _differentiated(compiler, specialization, backend, chosen, ctx, residuals, gradients)
    except Exception as error:
        if not is_fault(error):
            raise
        fault = Fault.of(error)
    results = users_backward(compiler, specialization, chosen, ctx, residuals, gradients)
    backward_failed(compiler, specialization, fault, gradients)
    return results


def _differentiated(
    compiler: Compiled,
    specialization: Specialization,
    backend: str,
    chosen: Chosen | None,
    ctx: Any,
    residuals: list[Any],
    gradients: Sequence[Any],
) -> Any:
    compiler.require_backward(specialization)
    sizes = ctx._fusegrad_sizes
    if specialization.backward_faulty:
        return users_backward(compiler, specialization, chosen, ctx, residuals, gradients)
    if (result := _on_what_changed(compiler, specialization, chosen, ctx, residuals, gradients)) is not None:
        return result
    if is_assigned(ctx, specialization):
        originals = residuals if chosen is None else chosen.originals(residuals, ctx)
        return _users_on(compiler, ctx, specialization, originals, gradients)
    recording = torch.is_grad_enabled() and any(map(is_tracked, (*residuals, *gradients)))
    recording = recording or any(map(has_tangent, (*residuals, *gradients)))
    in_a_batch = any(map(is_batched, gradients))
    traced = is_capturing()  # by another mode: no capture may begin, and none is refused for good
    if traced:
        compiler.seen_by_a_mode()
    if recording or in_a_batch or traced or transforms_active():
        originals = residuals if chosen is None else chosen.originals(residuals, ctx)
        opaque = compiler.records.get("backward", Record("")).status == "opaque"
        if in_a_batch or traced or opaque or compiler.is_debugged() or specialization.is_apart():
            return users_backward(compiler, specialization, None, ctx, originals, gradients)
        if (why := unasked_of(specialization, residuals, sizes, gradients, chosen)) is not None:
            compiler.refuse("backward", CaptureError(reason=why, where=specialization.backward_place()))
            return users_backward(compiler, specialization, None, ctx, originals, gradients)
        if not (transforms_active() or _is_captured(compiler, specialization, gradients)):
            return users_backward(compiler, specialization, None, ctx, originals, gradients)
        return BackwardUnit.of(compiler, specialization, backend).differentiable(originals, sizes, gradients)
    results = run_backward(compiler, specialization, backend, residuals, sizes, gradients, chosen, ctx)
    if (learn := getattr(type(ctx), "_fusegrad_learns", None)) is not None:
        with contained(compiler, "backward", gradients):
            learn(residuals, gradients)
    return results


def _is_captured(compiler: Compiled, specialization: Specialization, gradients: Sequence[Any]) -> bool:
    """Whether there is one graph for these gradients. Where there is none that is on record before anything runs:
    a derivative would run it again, and it may have effects, or draw."""
    try:
        entry = specialization.entry(tuple(gradient_kind(in_a_class(g)) for g in gradients))
    except OpaqueMet as error:
        compiler.derivative_refused(error)
        return False
    except CaptureError as error:
        if compiler.take_out("backward", error):
            specialization.adopt(compiler.cls, compiler.reads_now())
            return _is_captured(compiler, specialization, gradients)
        compiler.refuse("backward", error)
        return False
    for call in opaque_calls(entry):
        compiler.derivative_refused(CaptureError(reason=call.told, where=call.where))
    if entry.written:  # a derivative would compute it again, on what is in that memory by then
        compiler.derivative_refused(CaptureError(reason=WRITES_GIVEN, where=specialization.backward_place()))
    return not (entry.opaque or entry.written)


def _on_what_changed(
    compiler: Compiled,
    specialization: Specialization,
    chosen: Chosen | None,
    ctx: Any,
    residuals: Any,
    gradients: Sequence[Any],
) -> Any:
    """The user's own backward where the caller changed what is on ctx since forward; None where they did not."""
    sharing = specialization.sharing
    if sharing is None or (name := sharing.changed(ctx._fusegrad_shared)) is None:
        return None
    reason = f"what `ctx.{name}` shares with the caller changed after forward"
    compiler.refuse("backward", CaptureError(reason=reason, where=specialization.backward_place()))
    return users_backward(compiler, specialization, chosen, ctx, residuals, gradients)


def _users_on(
    compiler: Compiled, ctx: Any, specialization: Specialization, residuals: Sequence[Any], gradients: Any
) -> Any:
    """The user's own backward on a ctx that was written to from outside: on record."""
    if ASSIGNED not in compiler.records and compiler.records.get("backward", Record("")).status != "opaque":
        compiler.records[ASSIGNED] = record = Record("opaque", REASON, users_line())
        count("fallbacks")
        warn(f"{compiler.cls.__name__}.backward runs as you wrote it, uncompiled: {REASON} [{record.code}]")
    return users_backward(compiler, specialization, None, ctx, residuals, gradients)


def _unpacked(spec: Specialization, chosen: Chosen | None, ctx: Any) -> tuple[Any, ...]:
    """What the node saved. Where that is nothing it is not asked: it would raise once it was freed."""
    if not (spec.forward.saved if chosen is None else chosen.places):
        return ()
    return ctx.saved_tensors if chosen is None else saved_tensors_of(ctx)
