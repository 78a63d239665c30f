"""Methods around opaque nodes: compiled segment, the user's own nested call, compiled segment.

The first call is the user's own method on real tensors, its nested calls recorded; the capture, its check and every
later change of mind play them back. Where a node returns what no graph was captured for, the call is finished the same
way, and another graph is captured for such results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...ir.errors import FusegradError
from ...tracer.capture.capture import DataReadError, OpaqueCallError, capture_lock
from ...tracer.containers import open_containers, tensors_in
from ...tracer.methods import method_place
from ...tracer.opaque.call_interception import recording
from ...tracer.opaque.opaque import (
    Mismatch,
    Tape,
    remember_opaque,
    version,
)
from ...tracer.trace import CaptureError
from ..capture.opaque_replay import VARIANTS, offer_tape
from ..capture.outputs import restore_passthrough_inputs
from ..compiled.backward import CHANGES, MANY, MANY_ANSWERS, _has_own_lines, _learn, _of_operators, note
from ..compiled.budget import VAIN
from ..fallback.answer import Fault, is_fault, put_on_record, recorded_faults
from ..fallback.effects import launching
from ..fallback.records import OpaqueCall
from .node import node_of

if TYPE_CHECKING:
    from ..compiled.compiled import Compiled
    from ..specialize.specialization import Specialization

Tensor = torch.Tensor


class OpaqueWriteError(FusegradError):
    """An opaque body wrote to an argument of its caller, which it had not done when the caller was captured."""

    message = (
        "{function}: a nested call that runs in eager changed an argument in place, which it did not when traced\n"
        "  at:   {where}\n"
        "  fix:  declare `is_traceable = False` on {function}, so that all of it falls back to eager."
    )


# ------------------------------------------------------------------ the check


# ------------------------------------------------------------------ forward


def first_call(compiler: Compiled, opaque: OpaqueCallError, args: Sequence[Any]) -> Any:
    """A call at which an opaque node was met: the user's own class, recorded, then the capture."""
    if _differentiates_its_body(compiler, args):
        result = compiler.user.run(*args)
        if isinstance(opaque, DataReadError):
            compiler.ledger.refuse("forward", opaque)
        return result
    return _finished(compiler, args, Tape(data=isinstance(opaque, DataReadError)), opaque)


@launching
def run(compiler: Compiled, specialization: Specialization, args: Sequence[Any]) -> Any:
    """A call of a specialisation with opaque nodes."""
    if _differentiates_its_body(compiler, args):
        return compiler.user.run(*args)
    flat_args = open_containers(args)
    backend, versions = compiler.options.backend_for(flat_args), list(map(version, flat_args))
    tape = Tape(data=any(node.of_data for node in specialization.captured.opaque))
    for candidate in _candidates(compiler, specialization, flat_args):
        if not _goes_on(candidate, flat_args, tape):
            continue
        offer_tape(tape)
        try:
            result = node_of(compiler, candidate, compiler.node_key(candidate, backend), flat_args)(*args)
        except Mismatch:
            tape = tape.rewound_tape()
            _require_unwritten(compiler, flat_args, versions)
            continue
        except Exception as error:
            if not tape.calls() or not is_fault(error):
                raise
            fault = Fault.of(error)
            break
        finally:
            offer_tape(None)
        if candidate is not specialization:
            compiler.table.set_for_call(compiler.keys.exact(flat_args), candidate)
        return restore_passthrough_inputs(candidate.captured, result, args)
    else:
        return _finished(compiler, args, tape)
    _require_unwritten(compiler, flat_args, versions)
    return _recovered(compiler, args, tape.rewound_tape(), fault)


def _recovered(compiler: Compiled, args: Sequence[Any], tape: Tape, fault: Fault) -> Any:
    """A call that failed after opaque nodes had run: the user's own method, to which they are played back."""
    with recording(tape, skip=compiler.user.cls):
        result = compiler.user.run(*args)
    put_on_record(compiler, "forward", fault, args)
    return result


def _goes_on(specialization: Specialization, args: Sequence[Any], tape: Tape) -> bool:
    """True if a graph was captured for the values that opaque nodes returned in this call so far."""
    sizes, calls = specialization.captured.sizes(args), tape.rewound_tape()
    for node in specialization.captured.opaque if calls.pending else ():
        if (taped := calls.take(node.callee)) is None:
            return True
        if not node.fits(taped, sizes):
            return False
    return True


def _require_unwritten(compiler: Compiled, args: Sequence[Any], versions: Sequence[int]) -> None:
    """A call can be finished by hand only on the arguments that it began with."""
    if list(map(version, args)) != list(versions):
        raise OpaqueWriteError(function=compiler.user.cls.__name__)


def _candidates(compiler: Compiled, first: Specialization, args: Sequence[Any]) -> Iterator[Specialization]:
    yield first
    tensors = [a for a in args if isinstance(a, Tensor)]
    specializations = list(compiler.table.by_facts.get(compiler.keys.facts(args), ()))
    yield from (s for s in specializations if s is not first and s.captured.guard(tensors))


def _finished(compiler: Compiled, args: Sequence[Any], tape: Tape, opaque: OpaqueCallError | None = None) -> Any:
    """The user's own method for this call, then a graph for what its opaque nodes returned."""
    before = compiler.keys.reads_now().by_path()
    with recording(tape, skip=compiler.user.cls, operators=_of_operators(opaque)):
        result = compiler.user.run(*args)
    with recorded_faults(compiler, "forward", args), capture_lock, torch.no_grad():
        tape.require_whole()
        _learn(opaque)  # only now: what was wrong by itself has raised its own error
        if _has_own_lines(tape) and _changed(before, compiler.keys.reads_now().by_path()):
            compiler.ledger.report_once("forward", CHANGES)
            return result
        _add(compiler, open_containers(args), Tape(completed=tape.completed, data=tape.data))
    return result


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """True if something is read that is no longer as it was."""
    return any(path in before and before[path] != fact for path, fact in after.items())


def _refuse_more(compiler: Compiled, args: Sequence[Any], tape: Tape) -> None:
    """There are graphs enough. Where data decides, another one is wanted at every call: there are none from now on."""
    if not tape.data:
        compiler.ledger.report_once("forward", MANY)
        return
    compiler.table.by_facts.pop(compiler.keys.facts(args), None)
    compiler.table.by_call.clear()
    compiler.give_up(args, CaptureError(reason=MANY_ANSWERS, where=method_place(compiler.user.cls.forward)))  # type: ignore[attr-defined]


def _reason_to_wait(compiler: Compiled, args: Sequence[Any]) -> str | None:
    """The reason why another graph for calls like this one has to wait; None where it need not."""
    return compiler.budget.why_later(compiler.keys.facts(args), args) if compiler.is_patient() else None


def _add(compiler: Compiled, args: Sequence[Any], tape: Tape) -> None:
    specializations = [s for s in compiler.table.by_facts.get(compiler.keys.facts(args), ()) if s.captured.opaque]
    if any(_serves(s, args, tape) for s in specializations):  # another thread was first
        return
    if len(specializations) >= VARIANTS:
        _refuse_more(compiler, args, tape)
        return
    if specializations and (why := _reason_to_wait(compiler, args)) is not None:
        compiler.ledger.note_waiting(why, why == VAIN)
        return
    try:
        specialization = compiler.captures.enter_split(args, tape)
    except OpaqueCallError as error:  # one more opaque node, found only now: the next call records it
        if isinstance(error, DataReadError):
            compiler.table.opaque_nodes[compiler.keys.facts(args)] = error
        else:
            remember_opaque(error.callee, error.why)
        return
    except CaptureError as error:
        if not compiler.keys.take_out("forward", error):
            compiler.give_up(args, error)
        return
    for node in specialization.captured.opaque:
        note(compiler, OpaqueCall.of(node, "forward"), node.why.declared)


def _serves(specialization: Specialization, args: Sequence[Any], tape: Tape) -> bool:
    """True if a graph is for these arguments and for the values that the opaque nodes returned."""
    captured = specialization.captured
    if not captured.guard([a for a in args if isinstance(a, Tensor)]):
        return False
    sizes, calls = captured.sizes(args), tape.rewound_tape()
    return all(node.fits(calls.take(node.callee), sizes) for node in captured.opaque)


def _differentiates_its_body(compiler: Compiled, args: Sequence[Any]) -> bool:
    """A plain function that autograd records: its derived backward would run the opaque bodies once more."""
    plain = compiler.user.plain_function is not None
    return plain and torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args))
