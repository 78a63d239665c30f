"""A fault of fusegrad in a call: the user's own method answers the call, once; the fault goes on record, with a file.

An error that escapes and was neither meant for the user nor raised by the user's code is such a fault. It is kept as
texts: no frame of it, and no tensor, outlives the call.
"""

from __future__ import annotations

import linecache
import platform
import re
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.autograd.function import Function

from ...ir.errors import FusegradError
from ...tracer.capture.capture import capture_lock
from ...tracer.capture.context import backward_context
from ...tracer.function import call_users_method
from ...tracer.loops.stacks import unstacked
from ...tracer.methods import backward_method, method_place, takes_boxed_gradients
from ...tracer.opaque.opaque import call_for_real
from ...tracer.opaque.watching import watcher
from ...tracer.torch_private import custom_function_call, dual_level, transforms_active
from ...tracer.trace import CaptureError
from ..cache import entry_files, location
from ..cache import store as cache
from ..capture.ctx_attributes import attributes_on
from ..execution.source_writer import NODE, STRAIGHT
from ..settings.config import settings
from .effects import AFTER_EFFECTS, launching
from .user_traceback import USERS

Tensor = torch.Tensor
T = TypeVar("T")
LIMIT = 3
"""Faults of a class, each for calls of another kind, after which all of its calls run as written."""
REPORTS = 200
"""Files with reports that one cache folder holds."""
PACKAGE = __name__.partition(".")[0]
UNDER_FUNC = "torch.func"
DEFAULTS = [getattr(Function, n).__code__ for n in ("forward", "setup_context", "backward", "jvp", "vmap")]
"""What torch answers where a class has no such method."""
REFUSE = (Function.__module__, type(custom_function_call).__module__)
"""Where torch says that a class has no rule for a transform."""
STICKY = ("CUDA error", "HIP error", "Triton Error")


class FallbackTarget(Protocol):
    """A compiled class, as it is known here: `compiled/compiled.py` has it."""

    inline_cache: Any
    options: Any
    user: Any
    keys: Any
    table: Any
    ledger: Any


class FaultError(FusegradError):
    """A mistake of fusegrad in a call that must not run as written."""

    message = (
        "{function}.{method}: {reason}\n  at:   {where}\n"
        "  fix:  please report it. Without fullgraph=True the method falls back to eager."
    )


@dataclass(frozen=True)
class Fault:
    """The texts of an error. names: its class and the first line of its message. lacks_memory: no mistake, then."""

    names: str
    trace: str
    lacks_memory: bool

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """The texts of an error, whose frames let go of what they hold."""
        fault = cls(_names(error), _traceback_of(error), _lacks_memory(error))
        _clear(error)
        return fault


def _names(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


def _traceback_of(error: BaseException) -> str:
    with suppress(Exception):
        return "".join(traceback.format_exception(error))
    return type(error).__name__


def _lacks_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


def _clear(error: BaseException | None) -> None:
    """An error's frames, and those of the errors that led to it, hold no tensors any more."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


# ------------------------------------------------------------------ whose error it is
def hand_over(method: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls the user's own class or method in our place. An error that comes through here is the user's."""
    return method(*args, **kwargs)


def is_fault(error: Exception) -> bool:
    """True if an error is a fault of ours, so that the user's own method is to answer the call."""
    # Never twice: what speaks to the user, what the device cannot do again, what wrote already.
    if _is_meant(error) or _is_of_the_device(error) or any(hasattr(error, mark) for mark in (AFTER_EFFECTS, USERS)):
        return False
    if _is_looked_at() or _is_of_a_missing_method(error) or _is_of_randomness(error) or _is_of_an_index(error):
        return False
    # And not where the traceback leads through the user's own code: the error is the call's.
    steps = [step for step in traceback.walk_tb(error.__traceback__) if not _is_of_autograd(step[0])]
    return not (_is_handed_over([frame for frame, _ in steps]) or any(map(_is_of_a_hook, steps, steps[1:])))


def _is_of_a_missing_method(error: BaseException) -> bool:
    """True if torch says in its own words that the class lacks a method, as it does of a rule that is not derived."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code in DEFAULTS


def _is_a_missing_rule(error: BaseException) -> bool:
    """True if torch refuses a transform of a class, or the class lacks a method for one."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") in REFUSE


def _is_of_randomness(error: Exception) -> bool:
    """True if torch's vmap says that its `randomness` does not allow a draw, as it would of the method itself."""
    return type(error) is RuntimeError and str(error).startswith(_OF_RANDOMNESS)


_OF_RANDOMNESS = (
    "vmap: called random operation while in randomness error mode",
    "vmap: Cannot ask for different inplace randomness",
    "Vmap does not currently support same randomness",
)


def _is_of_an_index(error: Exception) -> bool:
    """True if an operation of torch's says that an index which is data is out of range."""
    return type(error) in (IndexError, RuntimeError) and _OF_AN_INDEX.match(str(error)) is not None


_OF_AN_INDEX = re.compile(
    r"index -?\d+ is out of bounds for dimension \d|index out of range in self|Target -?\d+ is out of bounds"
    r"|(one_hot: )?Class values must be"
)


Step = tuple[types.FrameType, int]


def _is_looked_at() -> bool:
    """True if a capture of ours is around it, where the error ends; or the `debug` setting lets errors through."""
    with suppress(Exception):
        return watcher() is not None or settings().debug
    return False


def _is_of_autograd(frame: types.FrameType) -> bool:
    """`Function.apply`, where it is written in Python."""
    return frame.f_globals.get("__name__") == Function.__module__


def _is_handed_over(frames: Sequence[types.FrameType]) -> bool:
    """True if the user's own code raised it: what answers in our place, or a call of a method that runs as written."""
    codes = [frame.f_code for frame in frames]
    if hand_over.__code__ in codes or call_users_method.__code__ in codes:
        return True
    inside = frames[codes.index(call_for_real.__code__) :] if call_for_real.__code__ in codes else ()
    return any(_room_of(frame) not in (PACKAGE, "torch", "contextlib") for frame in inside)


def _room_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _is_of_a_hook(step: Step, inner: Step) -> bool:
    """True if a call of a node went to what is not ours: a hook for saved tensors, a recomputation that ends there."""
    return _calls_a_node(*step) and not _is_ours(inner[0])


def _calls_a_node(frame: types.FrameType, line: int) -> bool:
    file = frame.f_code.co_filename
    if file.startswith(STRAIGHT):
        return linecache.getline(file, line).strip().startswith(NODE)
    return frame.f_code in launching.codes


def _is_ours(frame: types.FrameType) -> bool:
    return _room_of(frame) == PACKAGE or frame.f_code.co_filename.startswith(STRAIGHT)


def _is_meant(error: Exception) -> bool:
    """True if an error speaks to the user: refusals, torch's words, warnings of ours that a filter made errors."""
    if isinstance(error, FusegradError):
        return error.speaks != "inside"
    return isinstance(error, Warning) and type(error).__module__.partition(".")[0] == PACKAGE


def _is_of_the_device(error: Exception) -> bool:
    """An error of an accelerator that has happened already, or that stays: nothing can be run on it any more."""
    kind = getattr(torch, "AcceleratorError", ())
    return not _lacks_memory(error) and (isinstance(error, kind) or str(error).startswith(STICKY))


# ------------------------------------------------------------------ what answers
def answer_as_written(
    compiler: FallbackTarget,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fault: Fault,
    users: Callable[..., Any] | None = None,
) -> Any:
    """A call in which we failed, as the user wrote it: its error is the call's, too. users: `apply`, where known.

    Where the class has no rule for a transform its error is torch's refusal, which says nothing of our fault: that is
    on record either way.
    """
    under_func = transforms_active() or dual_level() >= 0
    try:
        result = hand_over(users or compiler.user.eager(), *args, **kwargs)
    except Exception as error:
        if under_func and _is_a_missing_rule(error) and _names(error) != fault.names:
            put_on_record(compiler, UNDER_FUNC, fault, args)
        raise
    with without_further_faults():
        put_on_record(compiler, UNDER_FUNC if under_func else "forward", fault, args)
        if not fault.lacks_memory and not under_func:
            _avoid_calls_like(compiler, args if not kwargs else compiler.user.bind(args, kwargs), fault)
    return result


@contextmanager
def without_further_faults() -> Iterator[None]:
    """Within the block no fault is told of: what is meant for the user leaves it, and nothing else."""
    try:
        yield
    except Exception as error:
        if _is_meant(error):
            raise


def _avoid_calls_like(compiler: FallbackTarget, args: tuple[Any, ...], fault: Fault) -> None:
    """Calls with arguments like these run as written from now on."""
    compiler.inline_cache.forget()
    opened = compiler.user.complete(args)
    with capture_lock:
        error = CaptureError(reason=reason_of(fault, None))
        compiler.table.refuse(compiler.keys.exact(opened), compiler.keys.facts(opened), error)


def users_backward(
    compiler: FallbackTarget, spec: Any, residual_choice: Any, ctx: Any, residuals: Sequence[Any], gradients: Any
) -> Any:
    """A backward in which we failed, as the user wrote it, on what forward kept for it."""
    captured = spec.captured
    saved_values = residuals if residual_choice is None else residual_choice.originals(residuals, ctx)
    forward, cls, saved = captured.forward, compiler.user.cls, len(captured.forward.saved)
    attributes, needs = attributes_on(ctx, captured), forward.needs_input_grad[: captured.count]
    own = backward_context(cls.__name__)(unstacked(saved_values[:saved], forward.stacks), attributes, needs)
    method = cls.vjp if cls.backward is Function.backward else cls.backward
    result = hand_over(method, own, *([list(gradients)] if takes_boxed_gradients(cls) else gradients))
    attributes_after = own.left()
    attributes.clear()
    attributes.update(attributes_after)
    return result


def backward_failed(compiler: FallbackTarget, spec: Any, fault: Fault, gradients: Sequence[Any]) -> None:
    """A fault in backward on record: from now on this specialisation's is the user's own."""
    put_on_record(compiler, "backward", fault, gradients)
    if not fault.lacks_memory:
        spec.backward.failed = spec.backward.faulty = True


@contextmanager
def recorded_faults(compiler: FallbackTarget, method: str, args: Sequence[Any] = ()) -> Iterator[None]:
    """Within the block nothing is done that a call's result depends on: a fault there is put on record, no more."""
    try:
        yield
        return
    except Exception as error:
        if not is_fault(error):
            raise
        fault = Fault.of(error)
    put_on_record(compiler, method, fault, args, "compiled")


# ------------------------------------------------------------------ the record
def put_on_record(
    compiler: FallbackTarget, method: str, fault: Fault, args: Sequence[Any] = (), status: str = "opaque"
) -> None:
    """A fault is told once. Raises FaultError where the method must not run as written, and nothing else of ours."""
    with without_further_faults():
        _put_on_record(compiler, method, fault, args, status)


def _put_on_record(compiler: FallbackTarget, method: str, fault: Fault, args: Sequence[Any], status: str) -> None:
    if fault.lacks_memory:
        compiler.ledger.note_fault(method, f"memory did not suffice: {fault.names}", status)
        return
    earlier = compiler.ledger.faults.setdefault(method, [])
    earlier.append(fault.names)
    if method == UNDER_FUNC or len(earlier) >= LIMIT:
        compiler.ledger.broken.add(method)
    if earlier.count(fault.names) == 1:
        compiler.ledger.note_fault(method, reason_of(fault, report(compiler, method, fault, args)), status)


def reason_of(fault: Fault, file: str | None) -> str:
    """As it is told and kept."""
    return f"internal error: {fault.names} (please report it{f' with {file}' if file else ''})"


def report(compiler: FallbackTarget, method: str, fault: Fault, args: Sequence[Any]) -> str | None:
    """The file that was written for a report, beside the cache; None where none can be."""
    with suppress(Exception):
        root = location.default_root()
        text = _report_text(compiler, method, fault, args)
        if root is None:
            return None
        folder = root / "faults"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = folder / f"{compiler.user.cls.__name__}-{method}-{cache.key_of(fault.trace)[:8]}.txt"
        if file.exists() or len(list(folder.iterdir())) < REPORTS:
            file.write_text(text, encoding="utf-8", errors="replace")
            return str(file)
    return None


def _report_text(compiler: FallbackTarget, method: str, fault: Fault, args: Sequence[Any]) -> str:
    own = backward_method(compiler.user.cls) if method == "backward" else None
    place = method_place(own or compiler.user.cls.forward)
    versions = {"Python": platform.python_version(), **entry_files.versions()}
    lines = [
        f"{compiler.user.cls.__module__}.{compiler.user.cls.__qualname__}.{method}, an internal error of fusegrad",
        f"at: {place}",
        f"compiled with: {compiler.options!r}, {settings()!r}",
        f"versions: {', '.join(f'{name} {v}' for name, v in versions.items() if v)}",
        *(f"argument {i}: {describe_argument(a)}" for i, a in enumerate(args)),
    ]
    return "\n".join([*lines, "", fault.trace, ""])


def describe_argument(value: Any) -> str:
    """An argument in a report: a tensor by what it is like, never by its data."""
    if not isinstance(value, Tensor):
        return type(value).__name__ if not isinstance(value, bool | int | float | None) else repr(value)
    return f"{value.dtype} {list(value.shape)} {value.device}, requires_grad={value.requires_grad}"
