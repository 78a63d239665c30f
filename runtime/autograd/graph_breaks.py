"""Methods around opaque nodes: compiled segment, the user's own nested call, compiled segment.

The first call is the user's own method on real tensors, its nested calls recorded; the capture, its check and every
later change of mind play them back. Where a node returns what no graph was captured for, the call is finished the same
way, and another graph is captured for such results.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...ir.errors import FusegradError
from ...tracer.capture.capture import CaptureError, DataMet, OpaqueMet, capture_lock
from ...tracer.containers import opened
from ...tracer.function import method_place
from ...tracer.opaque.nested import recording
from ...tracer.opaque.opaque import (
    Mismatch,
    Tape,
    remember,
    tensors_in,
    version,
)
from ...tracer.opaque.segments import Segment
from ..capture.ctx_attributes import left_on
from ..capture.opaque_replay import VARIANTS, offer
from ..fallback.answer import Fault, contained, is_fault, put_on_record
from ..fallback.effects import launching
from ..settings import logs
from ..settings.counters import count
from ..specialize.records import OpaqueCall

if TYPE_CHECKING:
    from ..specialize.compiled import Compiler
    from ..specialize.specialization import BackwardEntry, Specialization

Tensor = torch.Tensor


MANY = f"what its opaque nodes return keeps changing: beyond {VARIANTS} graphs it runs as you wrote it"


MANY_ANSWERS = f"what it decides by the data of a tensor keeps changing: beyond {VARIANTS} graphs it runs as written"


CHANGES = "it changed what it reads from outside: such a call's runs as you wrote it"
OTHER_SIZES = "it was captured for other sizes since this call's forward: this call's runs as you wrote it"


class OpaqueWriteError(FusegradError):
    """An opaque body wrote to an argument of its caller, which it had not done when the caller was captured."""

    message = (
        "{function}: a nested call that runs as written changed an argument in place, which it did not at the capture\n"
        "  at:   {where}\n"
        "  fix:  declare `is_traceable = False` on {function}, so that all of it runs as you wrote it."
    )


# ------------------------------------------------------------------ the check


# ------------------------------------------------------------------ forward


def first_call(compiler: Compiler, met: OpaqueMet, args: Sequence[Any]) -> Any:
    """A call at which an opaque node was met: the user's own class, recorded, then the capture."""
    if _differentiates_its_body(compiler, args):
        result = compiler.users(*args)
        if isinstance(met, DataMet):
            compiler.refuse("forward", met)
        return result
    return _finished(compiler, args, Tape(data=isinstance(met, DataMet)), met)


@launching
def run(compiler: Compiler, specialization: Specialization, args: Sequence[Any]) -> Any:
    """A call of a specialisation with opaque nodes."""
    if _differentiates_its_body(compiler, args):
        return compiler.users(*args)
    given = opened(args)
    backend, versions = compiler.backend_for(given), list(map(version, given))
    tape = Tape(data=any(node.of_data for node in specialization.opaque))
    for candidate in _candidates(compiler, specialization, given):
        if not _goes_on(candidate, given, tape):
            continue
        offer(tape)
        try:
            result = compiler.node(candidate, compiler.node_key(candidate, backend), given)(*args)
        except Mismatch:
            tape = tape.again()
            _require_unwritten(compiler, given, versions)
            continue
        except Exception as error:
            if not tape.calls() or not is_fault(error):
                raise
            fault = Fault.of(error)
            break
        finally:
            offer(None)
        if candidate is not specialization:
            compiler.prefer(candidate, given)
        return candidate.with_given(result, args)
    else:
        return _finished(compiler, args, tape)
    _require_unwritten(compiler, given, versions)
    return _recovered(compiler, args, tape.again(), fault)


def _recovered(compiler: Compiler, args: Sequence[Any], tape: Tape, fault: Fault) -> Any:
    """A call that failed after opaque nodes had run: the user's own method, to which they are played back."""
    with recording(tape, skip=compiler.cls):
        result = compiler.users(*args)
    put_on_record(compiler, "forward", fault, args)
    return result


def _goes_on(specialization: Specialization, args: Sequence[Any], tape: Tape) -> bool:
    """Whether what opaque nodes returned in this call so far is what a graph was captured for."""
    sizes, calls = specialization.sizes(args), tape.again()
    for node in specialization.opaque if calls.pending else ():
        if (taped := calls.take(node.what)) is None:
            return True
        if not node.fits(taped, sizes):
            return False
    return True


def _require_unwritten(compiler: Compiler, args: Sequence[Any], versions: Sequence[int]) -> None:
    """A call can be finished by hand only on the arguments that it began with."""
    if list(map(version, args)) != list(versions):
        raise OpaqueWriteError(function=compiler.cls.__name__)


def _candidates(compiler: Compiler, first: Specialization, args: Sequence[Any]) -> Iterator[Specialization]:
    yield first
    tensors = [a for a in args if isinstance(a, Tensor)]
    yield from (s for s in list(compiler.known.get(compiler.facts(args), ())) if s is not first and s.guard(tensors))


def _finished(compiler: Compiler, args: Sequence[Any], tape: Tape, met: OpaqueMet | None = None) -> Any:
    """The user's own method for this call, then a graph for what its opaque nodes returned."""
    before = compiler.reads_now().by_path()
    with recording(tape, skip=compiler.cls, operators=_of_operators(met)):
        result = compiler.users(*args)
    with contained(compiler, "forward", args), capture_lock, torch.no_grad():
        tape.require_whole()
        _learn(met)  # only now: what was wrong by itself has raised its own error
        if _has_own_lines(tape) and _changed(before, compiler.reads_now().by_path()):
            compiler.report_once("forward", CHANGES)
            return result
        _add(compiler, opened(args), Tape(made=tape.made, data=tape.data))
    return result


def _has_own_lines(tape: Tape) -> bool:
    """Whether lines of the method itself ran apart. What other opaque bodies change is read by them, as a rule."""
    return any(isinstance(taped.what, Segment) for taped in tape.made)


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether something is read that is no longer as it was."""
    return any(path in before and before[path] != fact for path, fact in now.items())


def _learn(met: OpaqueMet | None) -> None:
    """From now on calls of what was met are opaque. That a method asks what is in a tensor says nothing of others."""
    if met is not None and not isinstance(met, DataMet):
        remember(met.what, met.why)


def _of_operators(met: OpaqueMet | None) -> bool:
    """Whether an operator was met that stays as it is."""
    return isinstance(getattr(met, "what", None), str) and not isinstance(met, DataMet)


def _refuse_more(compiler: Compiler, args: Sequence[Any], tape: Tape) -> None:
    """There are graphs enough. Where data decides, another one is wanted at every call: there are none from now on."""
    if not tape.data:
        compiler.report_once("forward", MANY)
        return
    compiler.known.pop(compiler.facts(args), None)
    compiler.exact.clear()
    compiler.give_up(args, CaptureError(reason=MANY_ANSWERS, where=method_place(compiler.cls.forward)))  # type: ignore[attr-defined]


def _add(compiler: Compiler, args: Sequence[Any], tape: Tape) -> None:
    known = [s for s in compiler.known.get(compiler.facts(args), ()) if s.opaque]
    if any(_serves(s, args, tape) for s in known):  # another thread was first
        return
    if len(known) >= VARIANTS:
        _refuse_more(compiler, args, tape)
        return
    if known and (why := compiler.why_later(args)) is not None:
        compiler.waits(why)
        return
    try:
        specialization = compiler.capture_split(args, tape)
    except OpaqueMet as error:  # one more opaque node, found only now: the next call records it
        if isinstance(error, DataMet):
            compiler.met[compiler.facts(args)] = error
        else:
            remember(error.what, error.why)
        return
    except CaptureError as error:
        if not compiler.take_out("forward", error):
            compiler.give_up(args, error)
        return
    for node in specialization.opaque:
        note(compiler, OpaqueCall.of(node, "forward"), node.why.declared)


def _serves(specialization: Specialization, args: Sequence[Any], tape: Tape) -> bool:
    """Whether a graph is for these arguments and for what the opaque nodes returned."""
    if not specialization.guard([a for a in args if isinstance(a, Tensor)]):
        return False
    sizes, calls = specialization.sizes(args), tape.again()
    return all(node.fits(calls.take(node.what), sizes) for node in specialization.opaque)


def note(compiler: Compiler, call: OpaqueCall, declared: bool) -> None:
    """On record, once; with a warning where the author has not asked for it."""
    if call in compiler.opaque_calls:
        return
    compiler.opaque_calls.append(call)
    told = f"{compiler.cls.__name__}.{call}{call.code}"
    logs.split(told)
    if not declared:
        from ..specialize.records import FallbackWarning

        count("fallbacks")
        warnings.warn(told, FallbackWarning, stacklevel=2)


def _differentiates_its_body(compiler: Compiler, args: Sequence[Any]) -> bool:
    """A plain function that autograd records: its derived backward would run the opaque bodies once more."""
    plain = hasattr(compiler.cls, "_fusegrad_sources")
    return plain and torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args))


# ------------------------------------------------------------------ backward
def backward(
    compiler: Compiler,
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
    from ..specialize.specialization import gradient_kind, in_a_class

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
    compiler: Compiler, spec: Specialization, kinds: Any, tape: Tape, residuals: Any, sizes: Any, gradients: Any
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
