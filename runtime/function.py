"""`@fusegrad.compile`: the class that the user gets, and the Function that runs for him when no transform is active.

A generated ctx-style Function is the real thing: version checks, saved-tensor hooks, `grad_fn` names and errors are
autograd's own. Its forward and backward only execute what was captured.
"""

from __future__ import annotations

import functools
import inspect
import operator
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch.autograd.function import Function

from ..ir.codes import code_of
from ..ir.errors import FusegradError, KeywordOnlyError, NotTraceableError, users_line
from ..ir.once import once
from ..ir.switches import takes
from ..tracer.capture import CaptureError, DataMet, OpaqueMet, capture_lock, is_capturing
from ..tracer.containers import opened
from ..tracer.declared import Option
from ..tracer.function import (
    backward_method,
    exact_gradients,
    method_place,
    methods_now,
    uses_setup_context,
)
from ..tracer.locks import CLASS, lock_of
from ..tracer.nested import Watcher, watcher
from ..tracer.opaque import Mismatch, Tape, Why, remember
from ..tracer.packages import home_of
from ..tracer.pictures import HOMES, one_allowance, suspects
from ..tracer.reads import Reads, each_closure_once
from ..tracer.torch_private import (
    apply_now,
    direct_apply,
    dual_level,
    has_tangent,
    hooks_are_active,
    is_batched,
    is_fake,
    observing_mode,
    saved_tensors_of,
    share_memory,
    transforms_active,
)
from . import distributed, logs, pickled, split
from .asked import is_outer
from .attributes import REASON, is_assigned
from .budget import VAIN, Budget, alike
from .calls import name_in_graphs
from .config import backend_name, valid_backend, valid_numerics, warns, with_numerics
from .derived import require_transposable, valid_derive_jvp, why_no_backward, with_derived_backward
from .draws import require_none as require_no_draws
from .effects import careful, launching
from .fallback import (
    UNDER_FUNC,
    Fault,
    FaultError,
    answered,
    backward_failed,
    contained,
    hand_over,
    is_fault,
    put_on_record,
    stack_level,
    users_backward,
)
from .forms import signed
from .guards import (
    argument_fact,
    carried,
    exact_key,
    global_state,
    is_closure,
    is_given_twice,
    is_meta,
    is_plain,
    is_tracked,
    unasked,
    unseen_state,
)
from .interop import applied, fits_a_graph, metaclass_for, shown_apart, with_opaque_backward
from .node import make_node
from .opaque import WRITES_GIVEN, opaque_forward_of
from .outer import called_within, in_dynamos_graph
from .ready import Ready, shapes_of
from .residuals import Chosen
from .specialization import Specialization, gradient_kind, in_a_class
from .stats import count
from .stored import found as found_on_disk
from .traceable import Traceability
from .unit import BackwardUnit, transformed

Tensor = torch.Tensor
C = TypeVar("C", bound=Callable[..., Any])
"""A class or a function: what is compiled keeps its static type."""
class_lock = lock_of(CLASS)
REMEMBERED = 1024
"""Exact layouts that a class remembers before it asks the guards again."""
VARIANTS = 64
"""Keys other than sizes (dtypes, constants, ...) that a class is captured for; beyond them its own methods run."""

MODES, ANOMALY = "dispatch modes", "anomaly mode"
"""The records of calls under a TorchDispatchMode, and of double backwards under torch.autograd.detect_anomaly."""
ASSIGNED = "attributes of grad_fn"
FURTHER = "further kinds of calls"
"""The record of kinds that wait for a capture, of a class some kinds of which were refused."""
DEBUGGED = "anomaly mode is on, which names the operation that made a NaN"
ATTEMPTS = 8
"""Keys for which a capture is tried while none succeeds; after them the method runs as written without a trial."""


class CompileTargetError(FusegradError, TypeError):
    """`compile` was given something that it cannot compile."""

    message = "fusegrad.compile({what}): {detail}\n  at:   {where}\n  fix:  {fix}"


@dataclass(frozen=True)
class Record:
    """What became of a method: compiled, opaque (why, where), derived, or absent."""

    status: str
    reason: str | None = None
    where: str | None = None

    @property
    def code(self) -> str | None:
        """Of the reason, in `ir/codes.py`."""
        return code_of(self.reason)


class FallbackWarning(UserWarning):
    """A method runs as the user wrote it, uncompiled."""


@dataclass(frozen=True)
class Attempt:
    """A capture of forward that failed: the user's own method is to run, and the reason to be put on record."""

    error: CaptureError
    key: Any
    facts: Any


class NotCaptured(Exception):
    """forward could not be captured for a call. The attempt is what may be kept of it: this has frames of the call."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(str(attempt.error))
        self.attempt = attempt


_UNKNOWN: Any = object()
"""What arguments are looked up as that no call had before."""


class Later(Exception):
    """A call is not worth a capture yet, and why: the user's own class is to run, whole."""


class Compiler:
    """All that is known about one class: its specialisations by key, and the methods that stay the user's own."""

    def __init__(
        self,
        cls: type,
        backend: str,
        fullgraph: bool,
        dynamic: bool,
        traceable: Option | None = None,
        derive_jvp: str | bool = "backward",
        numerics: str = "eager",
    ) -> None:
        HOMES.add(home_of(cls))
        self.numerics = numerics
        self.backend, self.fullgraph, self.dynamic, self.derive_jvp = backend, fullgraph, dynamic, derive_jvp
        self.methods = Traceability(cls, traceable)
        self.user_class, self.cls = cls, with_derived_backward(cls, self.methods)
        self.derives_backward = self.cls is not cls
        self.methods.segmented.allowed &= not (fullgraph or self.derives_backward)
        self.setup_style = uses_setup_context(cls)
        self._signed: tuple[tuple[Any, ...], inspect.Signature] | None = None
        self.records: dict[str, Record] = {}
        self.exact: OrderedDict[Any, Specialization | None] = OrderedDict()
        self.known: OrderedDict[Any, list[Specialization]] = OrderedDict()
        self.refused: OrderedDict[Any, CaptureError] = OrderedDict()
        self.unbounded = False  # whether what is compared of a call was once more than can be
        self.met: OrderedDict[Any, OpaqueMet] = OrderedDict()
        self.split_kinds: OrderedDict[Any, OpaqueMet] = OrderedDict()  # the same, numbers and identities apart
        self.budget = Budget(cls)
        self.rules: OrderedDict[Any, Any] = OrderedDict()  # how DTensors are divided
        self.opaque_calls: list[split.OpaqueCall] = []
        self.reads: Reads | None = None
        self.marks: dict[Any, int] = {}
        self.pushes_below = False  # its own jvp is not captured under two levels of forward mode
        self.faults: dict[str, list[str]] = {}  # of ours, by method: `fallback.py`
        self.broken: set[str] = set()  # methods that run as written after too many
        self.ready = Ready(self)
        self.fits = fits_a_graph(cls, self.methods)
        self.written = self._written()
        for role in self.methods.declared_opaque():
            self._put_on_record(role)

    def _written(self) -> type:
        """The class that runs where nothing is captured."""
        method = backward_method(self.cls)
        kept_out = method is not None and self.methods.declared["backward"].value is False
        return with_opaque_backward(self.cls, method) if method is not None and kept_out else self.cls

    def _follow_segments(self) -> None:
        """What could not be captured was taken out of the methods: from now on the class is the rewritten one."""
        if not self.methods.segmented.allowed or self.methods.cls is self.cls:
            return
        self.cls = self.methods.cls
        self.written = self._written()
        for name in ("shown", "beside"):
            vars(self).pop(name, None)

    def take_out(self, role: str, error: CaptureError) -> bool:
        """Take out of a method what its capture failed at; whether it is worth another attempt."""
        if not self.methods.take_out(role, error):
            return False
        self.reads = None
        self.reads_now()
        return True

    def options(self) -> tuple[Any, ...]:
        """What `compile` was told, in the order of its parameters."""
        told = self.backend, self.fullgraph, self.dynamic, self.methods.option, self.derive_jvp, self.numerics
        return told

    def begin_again(self, assigned: dict[str, Any]) -> type:
        """Methods were assigned to the compiled class: from now on it stands for the class that is returned."""
        original: type = getattr(self, "original", self.user_class)
        names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        users = type(original.__name__, (original,), {**names, **assigned}) if assigned else original
        fresh = Compiler(users, *self.options())
        with class_lock:
            kept = {**vars(fresh), "ready": self.ready, "original": original}
            vars(self).update(kept)
            for name in vars(self).keys() - kept.keys():  # attributes that were made when they were asked for
                del vars(self)[name]
        self.ready.forget()
        return users

    def __reduce__(self) -> Any:
        """For those who pickle a class by its contents (cloudpickle): what was captured stays here."""
        return Compiler, (self.user_class, *self.options())

    # ------------------------------------------------------------------ calls
    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (watching := watcher()) is not None:
            return self._watched(watching, args, kwargs)
        if self._is_left_out():
            return self.as_written(*args, **kwargs)
        asked = args if not kwargs else None
        if self.setup_style and (kwargs or len(args) != len(self.parameters())):
            args, kwargs = self.bound(args, kwargs), {}
        if kwargs or (is_capturing() and not _is_linearized(args)):
            return self._followed(args, kwargs)
        if (around := _around(args)) is not None:
            return around(self, args)
        given = opened(args)
        specialization = self._found(given)
        if isinstance(specialization, Attempt | str):
            return self._instead(specialization, args)
        if specialization is not None and specialization.opaque:
            return split.run(self, specialization, args)
        if specialization is None or not self._serves(specialization, given):
            return self.as_written(*args)
        return self._called(specialization, given, args, asked)

    def _followed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that somebody else follows: an operator in his graph, or the class as it is written."""
        if is_outer() and not kwargs:
            return called_within(self, args)
        self.seen_by_a_mode()
        return self.users(*args, **kwargs)

    def _is_left_out(self) -> bool:
        """Whether forward runs as written wherever it is called, but in somebody else's graph, which refuses it."""
        declared = self.methods.declared["forward"].value is False or "forward" in self.broken
        return declared and not (is_capturing() and is_outer())

    @launching
    def _called(self, specialization: Specialization, given: Any, args: tuple[Any, ...], asked: Any) -> Any:
        """The call itself; where it came often it is written out, as it was asked for: next time no one looks it up."""
        key = self.node_key(specialization, self.backend_for(given))
        apply = self.node(specialization, key, given)
        kind = (specialization, key, shapes_of(given), torch.is_grad_enabled())
        if specialization.given or any(map(is_closure, args)):  # what is written out returns what `apply` does
            asked = None  # and a closure, made for one call, would be looked into at every other
        if asked is not None and self.ready.is_due(kind) and takes("ready", specialization.name):
            with contained(self, "forward", args):
                self._write_entry(kind, key, asked, given)
        keeper = specialization.keeper
        if keeper is None:
            return specialization.with_given(apply(*args), args)
        try:
            result = apply(*args)
            with contained(self, "forward", args):
                keeper.keep_forward(specialization)
        finally:
            keeper.let_go()
        return specialization.with_given(result, args)

    def _write_entry(self, kind: Any, key: Any, asked: Any, given: Any) -> None:
        from .written import write_entry

        with capture_lock:
            self.ready.add(kind, asked, write_entry(self, kind[0], key, asked, given))

    def _watched(self, watching: Watcher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call within a method that is captured, or recorded for that: it is the watcher's to decide."""
        declared = self.methods.declared["forward"]
        if declared.value is False:
            remember(self.cls, Why(declared.how.removeprefix("it "), True))
        elif self.setup_style and (kwargs or len(args) != len(self.parameters())):
            args, kwargs = self.bound(args, kwargs), {}
        return watching(self.cls, lambda *a, **k: self(a, k), args, kwargs)

    def _found(self, given: Sequence[Any]) -> Specialization | Attempt | str | None:
        """The specialisation for a call, or why there is none: without the error, which has frames of the call."""
        try:
            return self.specialization(given, patient=self.is_patient())
        except Later as later:
            return str(later)
        except NotCaptured as error:
            return error.attempt

    def _instead(self, failed: Attempt | str, args: tuple[Any, ...]) -> Any:
        """The call at which a capture failed, or waits."""
        if isinstance(failed, str):
            self.waits(failed)
            return self.users(*args)
        if isinstance(failed.error, OpaqueMet):
            return split.first_call(self, failed.error, args)
        return self.run_users(failed, args)

    def is_patient(self) -> bool:
        """Whether a capture may wait: not where it was asked for, nor where the class as written has no backward."""
        return not (self.fullgraph or self.derives_backward or self.must_capture("forward"))

    def run_users(self, failed: Attempt, args: Sequence[Any]) -> Any:
        """The user's own class, and only then the record: a call that is wrong by itself raises its own error here."""
        try:
            result = self.as_written(*args)
        except BaseException:
            with capture_lock:  # nothing was learnt of the method
                self.refused.pop(failed.facts, None)
                self.exact.clear()
            raise
        with contained(self, "forward", args):
            self.refuse("forward", failed.error)
            self.refused[failed.facts] = failed.error.bare()
            self.exact[failed.key] = None
            self._forget_the_oldest()
        return result

    def _forget_the_oldest(self) -> None:
        _forget(self.exact, REMEMBERED)
        _forget(self.refused, REMEMBERED)

    def signature(self) -> inspect.Signature:
        """Of forward, in setup_context style: as it is now, defaults may be assigned."""
        forward = self.cls.forward  # type: ignore[attr-defined]
        now = signed(forward)
        if self._signed is None or not all(map(operator.is_, now, self._signed[0])):
            self.ready.forms.clear()
            self._signed = now, inspect.signature(forward)
        return self._signed[1]

    def parameters(self) -> Any:
        """The parameters of forward by name, in setup_context style."""
        return self.signature().parameters

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments by position, defaults filled in."""
        signature = self.signature()
        known = signature.parameters
        if alone := [k for k in kwargs if k in known and known[k].kind is inspect.Parameter.KEYWORD_ONLY]:
            self._refuse_keyword_only(alone, args, kwargs)
        if kwargs:
            self.ready.learn_form(signature, len(args), kwargs, lambda: self.cls.forward)  # type: ignore[attr-defined]
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args

    def _refuse_keyword_only(self, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise as torch.func does where a transform is active; otherwise torch calls unexpected what forward has."""
        if transforms_active():
            self.users(*args, **kwargs)
        raise KeywordOnlyError.of(self.cls.__name__, names)

    def writes(self, method: str) -> bool:
        """Whether the user wrote this rule himself."""
        return getattr(self.cls, method) is not getattr(Function, method)

    def users(self, *args: Any, **kwargs: Any) -> Any:
        """The class (or the plain function) as the user wrote it, uncompiled."""
        if (function := getattr(self.cls, "_fusegrad_sources", None)) is not None:
            return hand_over(function[0], *args, **kwargs)
        cls = self.shown if is_capturing() else self.written
        return hand_over(apply_now(cls), *args, **kwargs)

    @once
    def shown(self) -> type:
        """The class as a capture around it sees it: opaque as a whole where one of its methods is declared so."""
        if not self.methods.declared_opaque():
            return self.cls
        flags = {"is_traceable": False, "traceable": dict.fromkeys(self.methods.declared, False)}
        names = {"__module__": self.cls.__module__, "__qualname__": self.cls.__qualname__}
        return type(self.cls.__name__, (self.cls,), {**flags, **names})

    def as_written(self, *args: Any, **kwargs: Any) -> Any:
        """forward as the user wrote it; backward is captured by itself, where it may be."""
        if is_capturing() or transforms_active() or dual_level() >= 0 or any(map(is_meta, args)):
            return self.users(*args, **kwargs)
        if "forward" in self.broken:
            return self.users(*args, **kwargs)
        return self.beside(*args, **kwargs)

    @once
    def beside(self) -> Callable[..., Any]:
        """The class with its forward as it is and a backward that is captured, or just as it is."""
        found = None
        with contained(self, "backward"):
            found = opaque_forward_of(self)
        if found is None and not hasattr(self.cls, "_fusegrad_sources"):
            self._put_on_record("backward")
        return found or self.users

    def backend_for(self, args: Sequence[Any]) -> str:
        """The backend of this call: "auto" is triton for GPU tensors and the reference for CPU tensors."""
        asked = backend_name(self.backend)
        if asked == "auto":
            on_gpu = any(isinstance(a, Tensor) and a.device.type == "cuda" for a in args)
            asked = "triton" if on_gpu and triton_is_here() else "reference"
        return with_numerics(asked, self.numerics)

    # ------------------------------------------------------------------ specialisations
    def specialization(self, args: Sequence[Any], patient: bool = False) -> Specialization | None:
        """The specialisation that fits these arguments, captured if need be; None: the user's own methods run.

        Raises NotCaptured at the first call for which they have to. patient: raises Later where it costs too much.
        """
        if self._is_hopeless() and not self.must_capture("forward"):
            return None  # whatever a key would say
        if patient and (why := self.budget.why_not_begun()) is not None:
            raise Later(why)
        is_first = self.reads is None
        with each_closure_once() if any(map(is_closure, args)) else nullcontext():
            found = self.exact.get(self._key(args), _UNKNOWN)
            return found if found is not _UNKNOWN else self._look_up(args, patient, not is_first)

    def is_known(self, args: Sequence[Any]) -> bool:
        """Whether arguments like these were given before, so that nothing reads what is in them to look them up."""
        return self._key(args) in self.exact

    def _key(self, args: Sequence[Any]) -> Any:
        reads = self.reads_now()
        with one_allowance():
            return (exact_key(args), global_state(), reads.mark, reads.facts(), self._beyond(args))

    def facts(self, args: Sequence[Any]) -> Any:
        """What has to be equal for a specialisation to be used again, sizes and strides apart."""
        reads = self.reads_now()
        with one_allowance() as is_spent:
            facts = (*map(argument_fact, args), *global_state(), reads.mark, *reads.facts(), self._beyond(args))
            self.unbounded = self.unbounded or is_spent()
        return facts

    def _beyond(self, args: Sequence[Any]) -> Any:
        """The methods, and what of the arguments the methods may ask for that no graph knows."""
        return methods_now(self.user_class), self._unseen(args)

    def _unseen(self, args: Sequence[Any]) -> str | None:
        reads = self.reads_now()
        if reads.asks_identity and is_given_twice(args):
            return "it may ask whether two arguments are one tensor, which they are"
        name = carried(args, reads.asked)
        return None if name is None else f"an argument is a tensor that carries `{name}`"

    def reads_now(self) -> Reads:
        """What the methods read besides their arguments, scanned once."""
        if self.reads is None:
            with capture_lock:
                self._scan()
            assert self.reads is not None
        return self.reads

    def _scan(self) -> None:
        """What is read may have become something else (a number a tensor, a helper another): its `mark` tells."""
        reads = self.methods.scan()
        self._follow_segments()
        reads.mark = self.marks.setdefault(reads.signature(), len(self.marks))
        if self.reads is None or reads.mark != self.reads.mark:
            self.reads = reads
            self.ready.forget()

    def complete(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments with defaults filled in, where the class's style fills them in."""
        if self.setup_style and len(args) != len(self.parameters()):
            args = self.bound(tuple(args), {})
        return opened(args)

    def require_capturable(self) -> None:
        """Raises CaptureError where the class says, or its code shows, that it must not be captured."""
        if (error := self.opaque("forward")) is not None:
            raise error

    def opaque(self, role: str) -> CaptureError | None:
        """Why a role must not be captured, by declaration or by its code; None where it may be tried."""
        self.reads_now()
        return self.methods.opaque(role)

    def backward_is_captured(self, specialization: Specialization) -> bool:
        """Whether rules may be derived from backward (or there is none): where it is opaque, the user's own serve."""
        if backward_method(self.user_class) is None:
            return True
        try:
            return not specialization.entry(specialization.predicted_kinds()).trace.opaque
        except DataMet as error:
            self.derivative_refused(error)
            return False
        except OpaqueMet:
            return False
        except CaptureError as error:
            if not any(specialization.forward.needs_input_grad):
                return True  # no gradient is asked of such a call, for which forward may keep nothing
            self.refuse("backward", error)
            return False

    def compare(self, specialization: Specialization, args: Sequence[Any], tape: Tape | None = None) -> None:
        """The first call's comparison with the user's own forward; raises CaptureError where they differ."""
        why = specialization.check_forward(args, tape)
        if why is not None:
            raise CaptureError(reason=why, where=method_place(self.cls.forward))  # type: ignore[attr-defined]

    def _serves(self, specialization: Specialization, given: Sequence[Any]) -> bool:
        """Whether a specialisation is for arguments that share memory as these do, and is known to be right."""
        if specialization.writes_inputs and share_memory(given):
            return False
        return not specialization.unchecked or self._now_compared(specialization, given)

    def _now_compared(self, specialization: Specialization, args: Sequence[Any]) -> bool:
        """Whether a capture that was made on made-up data is the user's method on real data."""
        try:
            with capture_lock, torch.no_grad():
                self.compare(specialization, args)
        except CaptureError as error:
            self.give_up(args, error)
            return False
        specialization.unchecked = False
        return True

    def _look_up(self, args: Sequence[Any], patient: bool, anew: bool) -> Specialization | None:
        """What fits arguments with a key that no call had. anew: what the methods read may be more than it was."""
        with capture_lock, each_closure_once():
            facts = self.facts(args)
            if patient and facts not in self.known:
                self._require_worth(facts, args)
            if facts not in self.known and anew:
                self._scan()
            key, facts = self._key(args), self.facts(args)
            tensors = [a for a in args if isinstance(a, Tensor)]
            found = next((s for s in self.known.get(facts, ()) if s.guard(tensors)), None)
            if patient and found is None and (met := self.split_kinds.get(alike(facts))) is not None:
                self.met.setdefault(facts, met.bare())  # it was in the way with another number: it would be again
            tried = facts in self.refused or self._is_hopeless() or any(map(is_meta, args))
            if found is None and not tried:
                if patient and facts in self.known:  # for other sizes
                    self._require_worth(facts, args)
                found, key = self._captured_in_parts(key, facts, args)
            self.exact[key] = found
            self._forget_the_oldest()
            return found

    def _require_worth(self, facts: Any, args: Sequence[Any]) -> None:
        """Raises Later where a capture for such a call has to wait."""
        if facts not in self.refused and (why := self.budget.why_later(facts, args)) is not None:
            raise Later(why)

    def why_later(self, args: Sequence[Any]) -> str | None:
        """Why another graph for calls like this one has to wait; None where it need not."""
        return self.budget.why_later(self.facts(args), args) if self.is_patient() else None

    def _captured_in_parts(self, key: Any, facts: Any, args: Sequence[Any]) -> tuple[Specialization, Any]:
        """A specialisation, and its key: what cannot be captured is taken out of the methods, as far as that helps."""
        while True:
            try:
                return self._captured(key, facts, args), self._key(args)
            except NotCaptured as missing:
                error = missing.attempt.error
                if isinstance(error, OpaqueMet) or not self.take_out("forward", error):
                    raise
                self.refused.pop(facts, None)
                key, facts = self._key(args), self.facts(args)

    def _is_hopeless(self) -> bool:
        """Whether every attempt so far failed, and there were enough: a number that changes must not mean another.

        One is enough where more would have to be compared than can be: no call is found again then.
        """
        return not self.known and len(self.refused) >= (1 if self.unbounded else ATTEMPTS)

    def _captured(self, key: Any, facts: Any, args: Sequence[Any]) -> Specialization:
        """A specialisation for arguments like these; raises NotCaptured, and no error of the user's comes with ours."""
        found = self._tried(facts, args)
        if isinstance(found, CaptureError):
            raise NotCaptured(Attempt(found, key, facts))
        facts = self.facts(args)  # a capture that came to functions of other packages compares what these read
        self.known.setdefault(facts, []).append(found)
        self.records.setdefault("forward", Record("compiled"))
        logs.captured(self, facts, found)
        return found

    def _tried(self, facts: Any, args: Sequence[Any]) -> Specialization | CaptureError:
        try:
            if facts in self.met:
                raise self.met[facts].bare()
            logs.captured_again(self, facts, args)
            with self.budget.attempt():
                return self._capture(args)
        except CaptureError as error:
            opaque = isinstance(error, OpaqueMet) and not isinstance(error, DataMet)
            if self.fullgraph if opaque else self.must_capture("forward"):
                self.refuse("forward", error)
            if isinstance(error, OpaqueMet):
                self.met[facts] = self.split_kinds[alike(facts)] = error.bare()
                _forget(self.met, REMEMBERED)
                _forget(self.split_kinds, REMEMBERED)
            else:
                self.refused[facts] = error.bare()  # at once: other threads wait for this attempt
            return error.bare()

    def capture_split(self, args: Sequence[Any], tape: Tape) -> Specialization:
        """A specialisation with opaque nodes, whose results are on the tape; chosen first from now on."""
        with self.budget.attempt():
            specialization = self._capture(args, tape)
        facts = self.facts(args)
        self.known.setdefault(facts, []).insert(0, specialization)
        self.records.setdefault("forward", Record("compiled"))
        self.prefer(specialization, args)
        return specialization

    def prefer(self, specialization: Specialization, args: Sequence[Any]) -> None:
        """Calls with arguments like these begin with this specialisation."""
        self.exact[self._key(args)] = specialization
        self._forget_the_oldest()

    def give_up(self, args: Sequence[Any], error: CaptureError) -> None:
        """Calls with arguments like these run as the user wrote them."""
        self.refuse("forward", error)
        self.refused[self.facts(args)] = error.bare()
        self.exact[self._key(args)] = None
        self._forget_the_oldest()

    def _capture(self, args: Sequence[Any], tape: Tape | None = None) -> Specialization:
        if len(self.known) >= VARIANTS:
            reason = (
                f"it is captured for {VARIANTS} combinations of constants and dtypes already; "
                "pass a number that changes at every call as a 0-d tensor"
            )
            raise CaptureError(reason=reason, where=users_line())
        if not all(is_plain(a) for a in args if isinstance(a, Tensor)):
            raise CaptureError(reason="an argument is a tensor subclass or not strided", where=users_line())
        if (why := unseen_state(args)) is not None:
            raise CaptureError(reason=why, where=users_line())
        if (why := self._unseen(args)) is not None:
            raise CaptureError(reason=why, where=users_line())
        self.require_capturable()
        self._require_comparable(args)
        stored, keeper = found_on_disk(self, args) if tape is None else (None, None)
        try:
            specialization = stored or self._captured_now(args, tape)
            specialization.keeper, specialization.counted = keeper, self.budget.of_backward
            if self.opaque("backward") is not None:
                self._put_on_record("backward")
            elif self.must_capture("backward"):
                self._capture_predicted_backward(specialization)
        except BaseException:
            if keeper is not None:
                keeper.let_go()
            raise
        if keeper is not None and (specialization.opaque or specialization.writes_inputs):
            keeper.let_go()  # it will not be kept
        return specialization

    def _require_comparable(self, args: Sequence[Any]) -> None:
        """Raises CaptureError where no key would ever be found again; looks at functions that are arguments."""
        reads = self.reads_now()
        if reads.facts() != reads.facts():
            raise CaptureError(reason="what it reads is more than can be compared at every call", where="unknown")
        reads.suspect(suspects(args))

    def _captured_now(self, args: Sequence[Any], tape: Tape | None) -> Specialization:
        """forward traced, compared with the user's own, and prepared."""
        replay = tape.again() if tape is not None else None
        specialization = Specialization(self.cls, args, self.reads_now(), self.dynamic, self.report, replay)
        require_no_draws(specialization)
        self.compare(specialization, args, tape)
        specialization.executable(self.backend_for(args))
        self.budget.spend(self.facts(args), args)
        return specialization

    def must_capture(self, role: str) -> bool:
        """Whether falling back is not allowed: asked for, and not taken back by the author for this role."""
        declared = self.methods.declared[role].value if role in self.methods.declared else None
        return self.fullgraph if declared is None else declared

    def _capture_predicted_backward(self, specialization: Specialization) -> None:
        """Where falling back is not allowed, backward's failure has to show at the call, not in the engine."""
        if backward_method(self.user_class) is None or not any(specialization.forward.needs_input_grad):
            return
        try:
            specialization.entry(specialization.predicted_kinds())
        except CaptureError as error:
            if self.fullgraph or isinstance(error, DataMet) or not isinstance(error, OpaqueMet):
                self.refuse("backward", error)

    def require_backward(self, specialization: Specialization) -> None:
        """Where backward is derived of jvp: raises NonLinearJvp, or torch's own error where jvp cannot be captured."""
        if not self.derives_backward or is_capturing():
            return
        try:
            require_transposable(self, specialization)
        except CaptureError as error:
            self.records["backward"] = Record("absent", *why_no_backward(self.user_class, error))
            Function.backward(None)

    def is_compiled(self, method: str) -> None:
        """A method was captured; what became of it before stays on record."""
        self.records.setdefault(method, Record("compiled"))

    def _put_on_record(self, role: str) -> None:
        """A role that must not be captured: with a warning, but for one that was declared so."""
        error = self.methods.opaque(role)
        if error is not None and self.methods.declared[role].value is False:
            self.records[role] = self.record_of(role, error)
        elif error is not None:
            self.refuse(role, error)

    def refuse(self, method: str, error: CaptureError) -> None:
        """Put a failed capture on record; raise where the user asked for that."""
        record = self.record_of(method, error)
        reason, where = record.reason, record.where
        if self.must_capture(method):
            raise NotTraceableError(function=self.cls.__name__, method=method, reason=reason, where=where) from error
        if method not in self.records or self.records[method].status != "opaque":
            self.records[method] = record
            count("fallbacks")
            logs.as_written(f"{self.cls.__name__}.{method}", reason, where)
            message = f"{self.cls.__name__}.{method} runs as you wrote it, uncompiled: {reason} ({where})"
            _warn(f"{message} [{record.code}]")

    def derivative_refused(self, error: CaptureError) -> None:
        """A derivative, or a batch of one, cannot be captured: torch's own transforms run it, on record."""
        count("fallbacks")
        if "torch.func" in self.records:
            return
        self.records["torch.func"] = record = Record("opaque", error.facts["reason"], error.facts["where"])
        _warn(f"{self.cls.__name__}: a derivative is not compiled: {record.reason} ({record.where}) [{record.code}]")

    def not_derived(self, error: CaptureError) -> str:
        """torch.func refuses the class, and no rules are derived of it: on record; the reason and its place."""
        record = self.record_of("forward", error)
        self.records.setdefault("torch.func", record)
        return f"{record.reason} ({record.where}) [{record.code}]"

    def derivative_failed(self, fault: Fault, args: Sequence[Any]) -> None:
        """A mistake of ours in a derivative, or in a batch of one, which torch's own transforms made instead."""
        put_on_record(self, UNDER_FUNC, fault, args)

    def not_in_graph(self, maker: str, reason: str, where: str) -> None:
        """A call breaks a graph that somebody else makes, and runs between two: on record."""
        self.records[maker] = Record("opaque", reason, where)

    def seen_by_a_mode(self) -> None:
        """A TorchDispatchMode (a selective checkpoint, a counter) is to see the class's own operations: on record."""
        if MODES in self.records or (mode := observing_mode()) is None:
            return
        reason = f"a TorchDispatchMode ({mode}) is active, which is to see the operations of the class"
        self.records[MODES] = Record("opaque", reason, users_line())
        count("fallbacks")
        _warn(f"{self.cls.__name__} runs as you wrote it, uncompiled: {reason} [{code_of(reason)}]")

    def is_debugged(self) -> bool:
        """Whether anomaly mode, which warns itself, is to see the operations of a backward that is differentiated."""
        if not torch.is_anomaly_enabled() or is_capturing() or transforms_active():
            return False
        if ANOMALY not in self.records:
            self.records[ANOMALY] = Record("opaque", DEBUGGED, users_line())
            count("fallbacks")
        return True

    def failed(self, method: str, reason: str, status: str) -> None:
        """A mistake of ours in a call, which the user's own method answered: on record, with a warning.

        Raises FaultError where it must not run.
        """
        where = method_place(self._method(method) if method in ("forward", "backward") else self._method("forward"))
        if self.must_capture(method):
            raise FaultError(function=self.cls.__name__, method=method, reason=reason, where=where)
        self.records[method] = Record(status, reason, where)
        what = "runs as you wrote it, uncompiled" if status == "opaque" else "goes another way"
        _warn(f"{self.cls.__name__}.{method} {what}: {reason} [{code_of(reason)}]", stack_level())
        count("fallbacks")
        logs.as_written(f"{self.cls.__name__}.{method}", reason, where)

    def leave_to_the_user(self, method: str, reason: str) -> None:
        """What is compiled cannot serve here: the user's own class does, with the reason on record."""
        self.refuse(method, CaptureError(reason=reason, where=method_place(self.cls.forward)))  # type: ignore[attr-defined]

    def report(self, method: str, why: str) -> None:
        """A captured method runs slower than its backend promises: on record, with a warning."""
        self.records[method] = Record("compiled", why, method_place(self._method(method)))
        count("fallbacks")
        _warn(f"{self.cls.__name__}.{method}: {why} [{code_of(why)}]")

    def report_once(self, method: str, why: str) -> None:
        """The same, at the first time."""
        if self.records.get(method, Record("")).reason != why:
            self.report(method, why)

    def waits(self, why: str) -> None:
        """A capture waits until calls of its kind came often: on record, with a warning where that is long."""
        if self.records.get("forward", Record("")).status == "opaque":
            self.records.setdefault(FURTHER, Record("opaque", why, method_place(self._method("forward"))))
        elif why != VAIN:
            self.report_once("forward", why)
        else:
            self.records["forward"] = Record("compiled", why, method_place(self._method("forward")))

    def record_of(self, method: str, error: CaptureError) -> Record:
        """The record of a failed capture."""
        reason, where = error.facts["reason"], error.facts["where"]
        if where == "unknown":
            where = method_place(self._method(method))
        return Record("opaque", reason, where)

    def _method(self, name: str) -> Any:
        return backward_method(self.cls) if name == "backward" else getattr(self.cls, name)

    # ------------------------------------------------------------------ the Function that runs
    def node_key(self, specialization: Specialization, backend: str) -> tuple[str, bool, bool]:
        """What tells the generated Functions of a specialisation apart: backend, hooks, whose backward it is."""
        own = self.methods.is_opaque("backward") or specialization.backward_failed
        return backend, hooks_are_active(), own

    def chosen(self, specialization: Specialization, key: tuple[str, bool, bool], sizes: Any) -> Chosen | None:
        """The cheaper residuals of a node, None where it keeps the user's own."""
        backend, observed, own = key
        free = backward_method(self.cls) is not None and not observed and not own
        return specialization.chosen(backend, sizes) if free else None

    def node(
        self, specialization: Specialization, key: tuple[str, bool, bool], args: Sequence[Any]
    ) -> Callable[..., Any]:
        """`apply` of the generated Function of a specialisation."""
        if key not in specialization.nodes:
            with capture_lock:
                self._add_node(specialization, key, args)
        apply: Callable[..., Any] = specialization.nodes[key]
        return apply

    def _add_node(
        self, specialization: Specialization, key: tuple[str, bool, bool], args: Sequence[Any]
    ) -> None:
        if key in specialization.nodes:  # another thread was first
            return
        chosen = self.chosen(specialization, key, specialization.sizes(args))
        node = make_node(self, specialization, key[0], chosen, key[2])
        specialization.nodes[key] = careful(direct_apply(node), specialization)

    def backward(
        self, specialization: Specialization, backend: str, chosen: Chosen | None, ctx: Any, gradients: Sequence[Any]
    ) -> Any:
        """backward of a generated Function: kernels, or the user's own body with the reason on record."""
        residuals = [*_unpacked(specialization, chosen, ctx), *ctx._fusegrad_tensors]
        try:
            return self._backward(specialization, backend, chosen, ctx, residuals, gradients)
        except Exception as error:
            if not is_fault(error):
                raise
            fault = Fault.of(error)
        results = users_backward(self, specialization, chosen, ctx, residuals, gradients)
        backward_failed(self, specialization, fault, gradients)
        return results

    def _backward(
        self,
        specialization: Specialization,
        backend: str,
        chosen: Chosen | None,
        ctx: Any,
        residuals: list[Any],
        gradients: Sequence[Any],
    ) -> Any:
        self.require_backward(specialization)
        sizes = ctx._fusegrad_sizes
        if specialization.backward_faulty:
            return users_backward(self, specialization, chosen, ctx, residuals, gradients)
        if (result := self._on_what_changed(specialization, chosen, ctx, residuals, gradients)) is not None:
            return result
        if is_assigned(ctx, specialization):
            originals = residuals if chosen is None else self.originals(chosen, residuals, ctx)
            return self._users_on(ctx, specialization, originals, gradients)
        recording = torch.is_grad_enabled() and any(map(is_tracked, (*residuals, *gradients)))
        recording = recording or any(map(has_tangent, (*residuals, *gradients)))
        in_a_batch = any(map(is_batched, gradients))
        traced = is_capturing()  # by another mode: no capture may begin, and none is refused for good
        if traced:
            self.seen_by_a_mode()
        if recording or in_a_batch or traced or transforms_active():
            originals = residuals if chosen is None else self.originals(chosen, residuals, ctx)
            opaque = self.records.get("backward", Record("")).status == "opaque"
            if in_a_batch or traced or opaque or self.is_debugged() or specialization.is_apart():
                return users_backward(self, specialization, None, ctx, originals, gradients)
            if (why := _unasked(specialization, residuals, sizes, gradients, chosen)) is not None:
                self.refuse("backward", CaptureError(reason=why, where=specialization.backward_place()))
                return users_backward(self, specialization, None, ctx, originals, gradients)
            if not (transforms_active() or self._is_captured(specialization, gradients)):
                return users_backward(self, specialization, None, ctx, originals, gradients)
            return BackwardUnit.of(self, specialization, backend).differentiable(originals, sizes, gradients)
        results = self.run_backward(specialization, backend, residuals, sizes, gradients, chosen, ctx)
        if (learn := getattr(type(ctx), "_fusegrad_learns", None)) is not None:
            with contained(self, "backward", gradients):
                learn(residuals, gradients)
        return results

    def _is_captured(self, specialization: Specialization, gradients: Sequence[Any]) -> bool:
        """Whether there is one graph for these gradients. Where there is none that is on record before anything runs:
        a derivative would run it again, and it may have effects, or draw."""
        try:
            entry = specialization.entry(tuple(gradient_kind(in_a_class(g)) for g in gradients))
        except OpaqueMet as error:
            self.derivative_refused(error)
            return False
        except CaptureError as error:
            if self.take_out("backward", error):
                specialization.adopt(self.cls, self.reads_now())
                return self._is_captured(specialization, gradients)
            self.refuse("backward", error)
            return False
        for call in split.opaque_calls(entry):
            self.derivative_refused(CaptureError(reason=call.told, where=call.where))
        if entry.written:  # a derivative would compute it again, on what is in that memory by then
            self.derivative_refused(CaptureError(reason=WRITES_GIVEN, where=specialization.backward_place()))
        return not (entry.opaque or entry.written)

    def _on_what_changed(
        self, specialization: Specialization, chosen: Chosen | None, ctx: Any, residuals: Any, gradients: Sequence[Any]
    ) -> Any:
        """The user's own backward where the caller changed what is on ctx since forward; None where he did not."""
        sharing = specialization.sharing
        if sharing is None or (name := sharing.changed(ctx._fusegrad_shared)) is None:
            return None
        reason = f"what `ctx.{name}` shares with the caller changed after forward"
        self.refuse("backward", CaptureError(reason=reason, where=specialization.backward_place()))
        return users_backward(self, specialization, chosen, ctx, residuals, gradients)

    def _users_on(self, ctx: Any, specialization: Specialization, residuals: Sequence[Any], gradients: Any) -> Any:
        """The user's own backward on a ctx that was written to from outside: on record."""
        if ASSIGNED not in self.records and self.records.get("backward", Record("")).status != "opaque":
            self.records[ASSIGNED] = record = Record("opaque", REASON, users_line())
            count("fallbacks")
            _warn(f"{self.cls.__name__}.backward runs as you wrote it, uncompiled: {REASON} [{record.code}]")
        return users_backward(self, specialization, None, ctx, residuals, gradients)

    def originals(self, chosen: Chosen, residuals: Sequence[Any], ctx: Any) -> list[Any]:
        """What the user saved: his own tensors with their history, the rebuilt ones without (as in eager)."""
        with torch.no_grad():
            rebuilt = chosen.rebuilt(residuals, ctx._fusegrad_sizes)
        supply = iter(r for r, p in zip(residuals, chosen.places, strict=True) if p is None or p.kind != "hidden")
        own = [p is None or p.kind != "hidden" for p in chosen.captured.residuals]
        return [next(supply) if mine else value for mine, value in zip(own, rebuilt, strict=True)]

    def run_backward(
        self,
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
            return self._gradients(specialization, backend, residuals, sizes, gradients, chosen, ctx)
        finally:
            if claim is not None:
                claim.let_go()

    def _gradients(
        self,
        specialization: Specialization,
        backend: str,
        residuals: Sequence[Any],
        sizes: Any,
        gradients: Sequence[Any],
        chosen: Chosen | None,
        ctx: Any,
    ) -> tuple[Any, ...]:
        try:
            if (why := _unasked(specialization, residuals, sizes, gradients, chosen)) is not None:
                raise CaptureError(reason=why, where=specialization.backward_place())
            results = specialization.run_backward(residuals, sizes, gradients, backend, chosen)
        except (OpaqueMet, Mismatch) as error:
            originals = residuals if chosen is None else chosen.rebuilt(residuals, sizes)
            results = split.backward(self, specialization, backend, originals, sizes, gradients, error, ctx)
        except CaptureError as error:
            originals = residuals if chosen is None else chosen.rebuilt(residuals, sizes)
            if self.take_out("backward", error):
                specialization.adopt(self.cls, self.reads_now())
                return self._gradients(specialization, backend, originals, sizes, gradients, None, ctx)
            results = self._users_gradients(specialization, originals, sizes, gradients, ctx)
            with contained(self, "backward", gradients):
                self.refuse("backward", error)
            return results
        self.records.setdefault("backward", Record("derived" if self.derives_backward else "compiled"))
        if specialization.keeper is not None:
            with contained(self, "backward", gradients):
                specialization.keeper.keep_backward(specialization, gradients)
        return results

    def _users_gradients(
        self, specialization: Specialization, originals: Sequence[Any], sizes: Any, gradients: Sequence[Any], ctx: Any
    ) -> tuple[Any, ...]:
        if ctx is None:
            return specialization.users_backward(originals, sizes, gradients)
        found = users_backward(self, specialization, None, ctx, originals, gradients)
        return exact_gradients(self.cls, found, specialization.count)


def _unpacked(spec: Specialization, chosen: Chosen | None, ctx: Any) -> tuple[Any, ...]:
    """What the node saved. Where that is nothing it is not asked: it would raise once it was freed."""
    if not (spec.forward.saved if chosen is None else chosen.places):
        return ()
    return ctx.saved_tensors if chosen is None else saved_tensors_of(ctx)


def _around(args: tuple[Any, ...]) -> Callable[[Any, tuple[Any, ...]], Any] | None:
    """What takes a call with DTensors, or within a transform; None for one on plain tensors."""
    if distributed.has_dtensors(args):
        return distributed.call
    return transformed if transforms_active() or dual_level() >= 0 else None


def _unasked(spec: Specialization, residuals: Sequence[Any], sizes: Any, gradients: Any, chosen: Any) -> str | None:
    """What backward may ask of the tensors at hand that its capture does not know; None where there is nothing."""
    return unasked(spec.reads, residuals, gradients) or spec.unasked_layout(residuals, sizes, gradients, chosen)


def _warn(message: str, level: int = 2) -> None:
    if warns():
        warnings.warn(message, FallbackWarning, stacklevel=level + 1)


def _is_linearized(args: Sequence[Any]) -> bool:
    """Whether a tracer follows the tangents of real tensors (torch.func.linearize): the rules are needed for it."""
    return dual_level() >= 0 and not any(map(is_fake, args))


def _forget(table: OrderedDict[Any, Any], limit: int) -> None:
    while len(table) > limit:
        table.popitem(last=False)


@functools.cache
def triton_is_here() -> bool:
    """Whether triton can be imported; warns once where it cannot."""
    try:
        import triton  # noqa: F401
    except ImportError:
        warnings.warn(
            "triton is not installed: GPU tensors run on the reference backend", FallbackWarning, stacklevel=2
        )
        return False
    return True


# ------------------------------------------------------------------ the decorator
@overload
def compile(
    target: C,
    /,
    *,
    backend: str = "auto",
    fullgraph: bool = False,
    dynamic: bool = True,
    traceable: Option | None = None,
    pytree: bool = False,
    derive_jvp: str | bool = "backward",
    numerics: str = "eager",
) -> C: ...
@overload
def compile(
    target: None = None,
    /,
    *,
    backend: str = "auto",
    fullgraph: bool = False,
    dynamic: bool = True,
    traceable: Option | None = None,
    pytree: bool = False,
    derive_jvp: str | bool = "backward",
    numerics: str = "eager",
) -> Callable[[C], C]: ...
def compile(
    target: Any = None,
    /,
    *,
    backend: str = "auto",
    fullgraph: bool = False,
    dynamic: bool = True,
    traceable: Option | None = None,
    pytree: bool = False,
    derive_jvp: str | bool = "backward",
    numerics: str = "eager",
) -> Any:
    """Compile a `torch.autograd.Function` class, or a plain function of tensors.

    The result is used as the original: `Fast.apply(...)`, or `fast(...)`. backend: "auto" (triton for GPU tensors, the
    reference for CPU tensors), "triton", "interpret" (the generated Triton text under Triton's interpreter, on CPU),
    "reference" (the captured ATen operations), "inductor". fullgraph: raise NotTraceableError where a method cannot be
    captured, instead of running it as written. dynamic: sizes are symbols, so that one capture serves every batch size.
    traceable: True, False, or a dict of these by method ("forward", "backward", "jvp"), ahead of what the class says: a
    method that is not traceable runs as written and is never captured, one that is has to be (else NotTraceableError).
    pytree: dicts, lists, tuples and registered containers of tensors are tracked, as arguments and as results; backward
    gets gradients in the structure of the output and returns one value in the structure of each argument.
    derive_jvp: what forward mode is where the class has no jvp: "backward" (its transpose, so that straight-through
    and scaled gradients are honoured), "forward" (the derivative of forward), False (none: torch's own error).
    numerics: of generated kernels: "eager" rounds where your operations round, with their accuracy; "fast" rounds low
    floats where they are stored alone, and takes the hardware's own quotients, roots and exponentials.

    Raises CompileTargetError for anything else, ConfigError for an unknown backend or numerics, DeclarationError for
    `traceable`, DeriveJvpError for `derive_jvp`.
    """
    valid_backend(backend)
    options = (backend, fullgraph, dynamic, traceable, valid_derive_jvp(derive_jvp), valid_numerics(numerics))
    named = dict(zip(("backend", "fullgraph", "dynamic", "traceable", "derive_jvp", "numerics"), options, strict=True))
    if target is None:
        return functools.partial(compile, **named, pytree=pytree)
    if pytree:
        from .trees import compile_tree

        return compile_tree(target, functools.partial(compile, **named))
    if isinstance(target, type):
        return compile_class(target, *options)
    if callable(target):
        from .plain import compile_function

        return compile_function(target, *options)
    raise CompileTargetError(
        what=repr(target)[:60],
        detail="it is neither a Function class nor a function",
        fix="pass the class or the function itself",
    )


def compile_class(
    cls: type,
    backend: str,
    fullgraph: bool,
    dynamic: bool,
    traceable: Option | None = None,
    derive_jvp: str | bool = "backward",
    numerics: str = "eager",
    below: bool = False,
) -> type:
    """A subclass of `cls` whose `apply` runs what was compiled.

    below: an `apply` of the user's own was called already.
    """
    if not issubclass(cls, Function):
        raise CompileTargetError(
            what=cls.__name__,
            detail="the class is no torch.autograd.Function",
            fix="derive it from torch.autograd.Function",
        )
    if issubclass(cls, torch.autograd.function.NestedIOFunction):
        raise CompileTargetError(
            what=cls.__name__,
            detail="NestedIOFunction is a legacy class that torch keeps for old code",
            fix="derive from torch.autograd.Function, with forward and backward as staticmethods instead of "
            "forward_extended and backward_extended, and compile it with pytree=True: nested arguments, results and "
            "gradients are tracked then",
        )
    cls = vars(cls).get("_fusegrad_user_class", cls)
    compiler = Compiler(cls, backend, fullgraph, dynamic, traceable, derive_jvp, numerics)
    itself: list[type] = []
    apply = entrance(compiler, itself)
    body: dict[str, Any] = {
        "apply": apply,
        "_fusegrad_apply": apply,  # Dynamo looks a bound method up by its own name
        "_fusegrad": compiler,
        "_fusegrad_user_class": cls,
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    bases: tuple[type, ...] = (cls,)
    if not below and (users := _own_apply(cls)) is not None:
        bases, body["apply"] = (cls, _below(apply)), shown_apart(users)
    fast: Any = metaclass_for(cls)(cls.__name__, bases, body)
    fast._backward_cls = cls._backward_cls  # type: ignore[attr-defined]
    itself.append(fast)
    pickled.remember(fast, compiler.options())
    return fast  # type: ignore[no-any-return]


def _own_apply(cls: type) -> Any:
    """The `apply` that the user wrote in front of torch's: it decides whether, and with what, that is called."""
    apply = next(vars(c)["apply"] for c in cls.__mro__ if "apply" in vars(c))
    is_ours = hasattr(getattr(apply, "__func__", None), "_fusegrad_within")
    return None if is_ours or apply is vars(Function)["apply"] else apply


def _below(apply: Any) -> type:
    """A base of the compiled class behind the user's: there their `super().apply` finds ours in place of torch's."""
    metaclass: Any = type(Function)
    below: type = metaclass("Function", (Function,), {"apply": apply, "__module__": Function.__module__})
    return below


def entrance(compiler: Compiler, itself: list[type]) -> Any:
    """`apply` of the compiled class that `itself` holds."""

    def run(own: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if own is not itself[0]:  # a subclass of the compiled class has methods of its own
            return compiled_subclass(own, compiler).apply(*args, **kwargs)
        return compiler(args, kwargs)

    def otherwise(own: type, args: tuple[Any, ...], kwargs: dict[str, Any], fault: Fault) -> Any:
        users = None if own is itself[0] else apply_now(_plain_subclass(own))
        return answered(compiler, args, kwargs, fault, users)

    def within(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return in_dynamos_graph(compiler, args, kwargs)

    apply: Any = applied(itself, name_in_graphs(compiler.user_class, within), compiler.ready, run, otherwise)
    def call_of(own: type) -> Callable[..., Any]:
        return lambda args, kwargs: compiled_subclass(own, compiler).apply.__func__._fusegrad_within(args, kwargs)

    apply._fusegrad_within, apply._fusegrad_call_of = within, call_of
    return classmethod(apply)


def compiled_subclass(cls: type, parent: Compiler) -> Any:
    """A user's subclass of a compiled class, compiled with its parent's options."""
    with class_lock:
        if "_fusegrad_compiled" not in vars(cls):  # with the class, so that it goes where the class goes
            cls._fusegrad_compiled = _subclass(cls, parent)  # type: ignore[attr-defined]
    return cls._fusegrad_compiled  # type: ignore[attr-defined]


def _subclass(cls: type, parent: Compiler) -> Any:
    return compile_class(_plain_subclass(cls), *parent.options())


def _plain_subclass(cls: type) -> type:
    """A user's subclass of a compiled class as if its parent were not."""
    plain = type(cls.__name__, (cls,), {"_fusegrad_user_class": None, "__module__": cls.__module__})
    plain._fusegrad_user_class = plain  # type: ignore[attr-defined]
    plain.apply = vars(Function)["apply"]  # type: ignore[attr-defined]
    return plain


__all__ = ["CompileTargetError", "Compiler", "FallbackWarning", "Record", "compile"]
