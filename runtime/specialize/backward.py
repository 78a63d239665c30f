"""backward on plain tensors: a captured graph, another one of its segments, or the user's own body, on record."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...tracer.capture.capture import DataMet, OpaqueMet, capture_lock
from ...tracer.function import exact_gradients
from ...tracer.opaque.nested import recording
from ...tracer.opaque.opaque import Mismatch, Tape, remember
from ...tracer.opaque.segments import Segment
from ...tracer.trace import CaptureError
from ..capture.ctx_attributes import left_on
from ..capture.guards import unasked
from ..capture.opaque_replay import VARIANTS
from ..fallback.answer import contained, users_backward
from ..settings import logs
from ..settings.counters import count
from .records import FallbackWarning, OpaqueCall, Record
from .residuals import Chosen
from .specialization import gradient_kind, in_a_class

if TYPE_CHECKING:
    from .compiled import Compiled
    from .specialization import BackwardEntry, Specialization


MANY = f"what its opaque nodes return keeps changing: beyond {VARIANTS} graphs it runs as you wrote it"
MANY_ANSWERS = f"what it decides by the data of a tensor keeps changing: beyond {VARIANTS} graphs it runs as written"
CHANGES = "it changed what it reads from outside: such a call's runs as you wrote it"
OTHER_SIZES = "it was captured for other sizes since this call's forward: this call's runs as you wrote it"


def _has_own_lines(tape: Tape) -> bool:
    """Whether lines of the method itself ran apart. What other opaque bodies change is read by them, as a rule."""
    return any(isinstance(taped.what, Segment) for taped in tape.made)


def _learn(met: OpaqueMet | None) -> None:
    """From now on calls of what was met are opaque. That a method asks what is in a tensor says nothing of others."""
    if met is not None and not isinstance(met, DataMet):
        remember(met.what, met.why)


def _of_operators(met: OpaqueMet | None) -> bool:
    """Whether an operator was met that stays as it is."""
    return isinstance(getattr(met, "what", None), str) and not isinstance(met, DataMet)


def note(compiler: Compiled, call: OpaqueCall, declared: bool) -> None:
    """On record, once; with a warning where the author has not asked for it."""
    if call in compiler.opaque_calls:
        return
    compiler.opaque_calls.append(call)
    told = f"{compiler.cls.__name__}.{call}{call.code}"
    logs.split(told)
    if not declared:
        count("fallbacks")
        warnings.warn(told, FallbackWarning, stacklevel=2)


def split_backward(
    compiler: Compiled,
    spec: Specialization,
    backend: str,
    residuals: Sequence[Any],
    sizes: Any,
    gradients: Sequence[Any],
    why: OpaqueMet | Mismatch,
    ctx: Any = None,
) -> tuple[Any, ...]:
    """backward of the user's own residuals: by another of its graphs, or by his Python, which is then captured.

    ctx: of the node, where there is one, for what his Python leaves there.
    """
    met, tape = (why, Tape(data=isinstance(why, DataMet))) if isinstance(why, OpaqueMet) else (None, why.tape.again())
    gradients_in_a_class = [in_a_class(g) for g in gradients]
    kinds = tuple(gradient_kind(g) for g in gradients_in_a_class)
    for entry in spec.other_entries(kinds):
        if not entry.admits(sizes):
            continue
        try:
            executable = spec.executable_of_entry(entry, kinds, backend)
            return spec.run_entry(entry, executable, residuals, sizes, gradients, tape)
        except Mismatch as mismatch:
            tape = mismatch.tape.again()
    before = spec.outside()
    with recording(tape, operators=_of_operators(met)):
        results = spec.users_backward(residuals, sizes, gradients, left={} if ctx is None else left_on(ctx, spec))
    with contained(compiler, "backward", gradients):
        tape.require_whole()
        _learn(met)
        if _has_own_lines(tape) and spec.outside() != before:
            compiler.report_once("backward", CHANGES)
            return results
        again = Tape(made=tape.made, data=tape.data)
        _add_backward(compiler, spec, kinds, again, residuals, sizes, gradients_in_a_class)
    return results


def _add_backward(
    compiler: Compiled, spec: Specialization, kinds: Any, tape: Tape, residuals: Any, sizes: Any, gradients: Any
) -> None:
    with capture_lock, torch.no_grad():
        if not spec.knows(sizes):
            compiler.report_once("backward", OTHER_SIZES)
            return
        try:
            added = spec.add_split_entry(kinds, tape, residuals, sizes, gradients)
        except OpaqueMet as error:
            _learn(error)
            return
        except CaptureError as error:
            if compiler.take_out("backward", error):
                spec.adopt(compiler.cls, compiler.reads_now())
            else:
                compiler.refuse("backward", error)
            return
    if added is None:
        compiler.report_once("backward", MANY)
        return
    for node, call in zip(added.trace.opaque, opaque_calls(added), strict=True):
        note(compiler, call, node.why.declared)


def opaque_calls(entry: BackwardEntry) -> list[OpaqueCall]:
    """The report of what a backward calls that runs as the user wrote it."""
    return [OpaqueCall.of(node, "backward") for node in entry.trace.opaque]


# ------------------------------------------------------------------ whatever its backward is
def run_backward(
    compiler: Compiled,
    specialization: Specialization,
    backend: str,
    residuals: Sequence[Any],
    sizes: Any,
    gradients: Sequence[Any],
    chosen: Chosen | None = None,
    ctx: Any = None,
) -> tuple[Any, ...]:
    """The gradients on plain tensors, no autograd recording. ctx: of the node, for what backward leaves there."""
    keeper = specialization.keeper
    claim = None if keeper is None or specialization.entries else keeper.claim_backward(gradients)
    try:
        return _gradients(compiler, specialization, backend, residuals, sizes, gradients, chosen, ctx)
    finally:
        if claim is not None:
            claim.release()


def _gradients(
    compiler: Compiled,
    specialization: Specialization,
    backend: str,
    residuals: Sequence[Any],
    sizes: Any,
    gradients: Sequence[Any],
    chosen: Chosen | None,
    ctx: Any,
) -> tuple[Any, ...]:
    try:
        if (why := unasked_of(specialization, residuals, sizes, gradients, chosen)) is not None:
            raise CaptureError(reason=why, where=specialization.backward_place())
        results = specialization.run_backward(residuals, sizes, gradients, backend, chosen)
    except (OpaqueMet, Mismatch) as error:
        originals = residuals if chosen is None else chosen.rebuilt(residuals, sizes)
        results = split_backward(compiler, specialization, backend, originals, sizes, gradients, error, ctx)
    except CaptureError as error:
        originals = residuals if chosen is None else chosen.rebuilt(residuals, sizes)
        if compiler.take_out("backward", error):
            specialization.adopt(compiler.cls, compiler.reads_now())
            return _gradients(compiler, specialization, backend, originals, sizes, gradients, None, ctx)
        results = _users_gradients(compiler, specialization, originals, sizes, gradients, ctx)
        with contained(compiler, "backward", gradients):
            compiler.refuse("backward", error)
        return results
    compiler.records.setdefault("backward", Record("derived" if compiler.derives_backward else "compiled"))
    if specialization.keeper is not None:
        with contained(compiler, "backward", gradients):
            specialization.keeper.keep_backward(specialization, gradients)
    return results


def _users_gradients(
    compiler: Compiled,
    specialization: Specialization,
    originals: Sequence[Any],
    sizes: Any,
    gradients: Sequence[Any],
    ctx: Any,
) -> tuple[Any, ...]:
    if ctx is None:
        return specialization.users_backward(originals, sizes, gradients)
    found = users_backward(compiler, specialization, None, ctx, originals, gradients)
    return exact_gradients(compiler.cls, found, specialization.count)


def unasked_of(spec: Specialization, residuals: Sequence[Any], sizes: Any, gradients: Any, chosen: Any) -> str | None:
    """What backward may ask of the tensors at hand that its capture does not know; None where there is nothing."""
    return unasked(spec.reads, residuals, gradients) or spec.unasked_layout(residuals, sizes, gradients, chosen)
