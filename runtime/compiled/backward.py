"""backward on plain tensors: a captured graph, another one of its segments, or the user's own body, on record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import Function

from ...tracer.capture.capture import DataReadError, OpaqueCallError, capture_lock, is_capturing
from ...tracer.frames import warn_user
from ...tracer.function import rebind
from ...tracer.gradients import exact_gradients, is_summable, shape_error
from ...tracer.methods import backward_method
from ...tracer.opaque.call_interception import recording
from ...tracer.opaque.opaque import Mismatch, Tape, remember_opaque
from ...tracer.opaque.segments import Segment
from ...tracer.trace import CaptureError
from ..capture.captured import CapturedFunction
from ..capture.captured_backward import admits_sizes, layout_guard_failure, needs_no_gradient, predicted_kinds
from ..capture.ctx_attributes import attributes_on
from ..capture.guards import backward_guard_failure
from ..capture.opaque_replay import VARIANTS
from ..capture.user_methods import run_user_backward
from ..fallback.answer import recorded_faults, users_backward
from ..fallback.records import FallbackWarning, OpaqueCall, Record
from ..settings import logs
from ..settings.counters import count
from ..specialize.compiled_backward import BackwardCall, run, run_entry
from .derived_backward import require_transposable, why_no_backward
from .slips import warn_of_no_gradient

if TYPE_CHECKING:
    from ..capture.captured_backward import BackwardEntry
    from ..specialize.specialization import Specialization
    from .compiled import Compiled


MANY = f"what its opaque nodes return keeps changing: beyond {VARIANTS} graphs it falls back to eager"
MANY_ANSWERS = f"what it decides by a tensor's data keeps changing: beyond {VARIANTS} graphs it falls back to eager"
CHANGES = "it changed what it reads from outside: the backward of such a call falls back to eager"
OTHER_SIZES = "it was traced for other sizes since this call's forward: its backward falls back to eager"


def _has_own_lines(tape: Tape) -> bool:
    """True if lines of the method itself ran apart. Changes by other opaque bodies are read by them, as a rule."""
    return any(isinstance(taped.callee, Segment) for taped in tape.completed)


def _learn(met: OpaqueCallError | None) -> None:
    """From now on calls of what was met are opaque. That a method asks what is in a tensor says nothing of others."""
    if met is not None and not isinstance(met, DataReadError):
        remember_opaque(met.callee, met.why)


def _of_operators(met: OpaqueCallError | None) -> bool:
    """True if an operator was met that stays as it is."""
    return isinstance(getattr(met, "callee", None), str) and not isinstance(met, DataReadError)


def note(compiler: Compiled, call: OpaqueCall, declared: bool) -> None:
    """On record, once; with a warning where the author has not asked for it."""
    if call in compiler.ledger.opaque_calls:
        return
    compiler.ledger.opaque_calls.append(call)
    told = f"{compiler.user.cls.__name__}.{call}{call.code}"
    logs.log_split(told)
    if not declared:
        count("fallbacks")
        warn_user(told, FallbackWarning)


def split_backward(
    compiler: Compiled, spec: Specialization, call: BackwardCall, why: OpaqueCallError | Mismatch
) -> tuple[Any, ...]:
    """backward of the user's own residuals: by another of its graphs, or by the user's Python, captured after that."""
    captured, met = spec.captured, why if isinstance(why, OpaqueCallError) else None
    tape = Tape(data=isinstance(why, DataReadError)) if isinstance(why, OpaqueCallError) else why.tape.rewound_tape()
    # Another capture of it may know what its opaque nodes return this time; what already ran is on the tape.
    for entry in spec.backward.other_entries(call.kinds):
        if not entry.admits(call.sizes):
            continue
        try:
            spec.backward.executable(call, entry, compares=False)
            return run_entry(spec.backward, entry, call, tape)
        except Mismatch as mismatch:
            tape = mismatch.tape.rewound_tape()
    # None does: the user's own body finishes the call, recorded, and what it called becomes a node of a new capture.
    before = captured.outside_state()
    with recording(tape, operators=_of_operators(met)):
        left = {} if call.ctx is None else attributes_on(call.ctx, captured)
        results = run_user_backward(captured, call.residuals, call.sizes, call.gradients, ctx_state=left)
    with recorded_faults(compiler, "backward", call.gradients):
        tape.require_whole()
        _learn(met)
        if _has_own_lines(tape) and captured.outside_state() != before:
            compiler.ledger.report_once("backward", CHANGES)
            return results
        _add_backward(compiler, spec, call, Tape(completed=tape.completed, data=tape.data))
    return results


def _add_backward(compiler: Compiled, spec: Specialization, call: BackwardCall, tape: Tape) -> None:
    with capture_lock, torch.no_grad():
        if not admits_sizes(spec.captured, call.sizes):
            compiler.ledger.report_once("backward", OTHER_SIZES)
            return
        try:
            added = spec.backward.add_split_entry(call, tape)
        except OpaqueCallError as error:
            _learn(error)
            return
        except CaptureError as error:
            if compiler.keys.take_out("backward", error):
                spec.adopt(compiler.user.cls, compiler.keys.reads_now())
            else:
                compiler.ledger.refuse("backward", error)
            return
    if added is None:
        compiler.ledger.report_once("backward", MANY)
        return
    for node, opaque in zip(added.trace.opaque, opaque_calls(added), strict=True):
        note(compiler, opaque, node.why.declared)


def opaque_calls(entry: BackwardEntry) -> list[OpaqueCall]:
    """The report of what a backward calls that runs as the user wrote it."""
    return [OpaqueCall.of(node, "backward") for node in entry.trace.opaque]


# ------------------------------------------------------------------ before a backward is asked for
def backward_is_captured(compiler: Compiled, spec: Specialization) -> bool:
    """True if rules may be derived from backward (or there is none): where it is opaque, the user's own serve."""
    if backward_method(compiler.user.original) is None:
        return True
    captured = spec.captured
    try:
        return not spec.backward.entry(predicted_kinds(captured)).trace.opaque
    except DataReadError as error:
        compiler.ledger.refuse_derivative(error)
        return False
    except OpaqueCallError:
        return False
    except CaptureError as error:
        if not any(captured.forward.needs_input_grad):
            return True  # no gradient is asked of such a call, for which forward may keep nothing
        compiler.ledger.refuse("backward", error)
        return False


def require_transposed(compiler: Compiled, spec: Specialization) -> None:
    """Raise NonLinearJvp where the jvp that backward is derived of has no transpose, torch's without a jvp."""
    if not compiler.user.derives_backward or is_capturing():
        return
    cls = compiler.user.original
    try:
        require_transposable(cls, compiler.keys.opaque, spec)
    except CaptureError as error:
        compiler.ledger.records["backward"] = Record("absent", *why_no_backward(cls, error))
        Function.backward(None)


# ------------------------------------------------------------------ whatever its backward is
def run_backward(compiler: Compiled, spec: Specialization, call: BackwardCall) -> tuple[Any, ...]:
    """The gradients on plain tensors, no autograd recording."""
    keeper = spec.keeper
    claim = None if keeper is None or spec.backward.entries else keeper.claim_backward(call.gradients)
    try:
        return _gradients(compiler, spec, call)
    finally:
        if claim is not None:
            with recorded_faults(compiler, "backward", call.gradients):
                claim.release()


def _gradients(compiler: Compiled, spec: Specialization, call: BackwardCall) -> tuple[Any, ...]:
    try:
        if (why := guard_failure(spec.captured, call)) is not None:
            raise CaptureError(reason=why, where=spec.captured.backward_place())
        results = run(spec.backward, call)
    except (OpaqueCallError, Mismatch) as error:
        results = _of_fitting_shapes(spec.captured, split_backward(compiler, spec, call.on_originals(), error), call)
    except CaptureError as error:
        call = call.on_originals()
        if compiler.keys.take_out("backward", error):
            spec.adopt(compiler.user.cls, compiler.keys.reads_now())
            return _gradients(compiler, spec, call)
        results = _of_fitting_shapes(spec.captured, _users_gradients(compiler, spec, call), call)
        with recorded_faults(compiler, "backward", call.gradients):
            compiler.ledger.refuse("backward", error)
        return results
    with recorded_faults(compiler, "backward", call.gradients):
        warn_of_no_gradient(spec.captured, results)
    compiler.ledger.records.setdefault("backward", Record("derived" if compiler.user.derives_backward else "compiled"))
    if spec.keeper is not None:
        with recorded_faults(compiler, "backward", call.gradients):
            spec.keeper.keep_backward(spec, call.gradients)
    return results


def _of_fitting_shapes(captured: CapturedFunction, results: tuple[Any, ...], call: BackwardCall) -> tuple[Any, ...]:
    """The gradients. Raises GradientShapeError for one that autograd would refuse; of a stored capture torch does."""
    if not captured.forward.is_traced:
        return results
    for i, gradient in enumerate(results):
        if isinstance(gradient, torch.Tensor) and i in captured.slots and not needs_no_gradient(captured, i):
            shape = rebind(captured.forward.fakes[captured.slots.index(i)].shape, call.sizes)
            if not is_summable(shape, gradient.shape):
                raise shape_error(captured.cls, i, captured.names[i], gradient.shape, shape)
    return results


def _users_gradients(compiler: Compiled, spec: Specialization, call: BackwardCall) -> tuple[Any, ...]:
    if call.ctx is None:
        return run_user_backward(spec.captured, call.residuals, call.sizes, call.gradients)
    results = users_backward(compiler, spec, None, call.ctx, call.residuals, call.gradients)
    return exact_gradients(compiler.user.cls, results, spec.captured.count)


def guard_failure(captured: CapturedFunction, call: BackwardCall) -> str | None:
    """The reason why a captured backward may not serve tensors like these: they show what no capture knows; or None."""
    return backward_guard_failure(captured.reads, call.residuals, call.gradients) or layout_guard_failure(
        captured, call.residuals, call.sizes, call.gradients, call.chosen is not None
    )
