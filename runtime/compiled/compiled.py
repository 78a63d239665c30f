"""One class: its options, its specializations by key, and the record of what stays the user's own."""

from __future__ import annotations

import functools
import inspect
import operator
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch.autograd.function import Function

from ...ir.codes import code_of
from ...ir.errors import KeywordOnlyError, NotTraceableError, users_line
from ...ir.lazy_attribute import lazy_attribute
from ...tracer.capture.capture import DataMet, OpaqueMet, capture_lock, is_capturing
from ...tracer.containers import opened
from ...tracer.declared import Option
from ...tracer.function import methods_now
from ...tracer.locks import CLASS, lock_of
from ...tracer.methods import backward_method, method_place, signed, uses_setup_context
from ...tracer.opaque.opaque import Tape
from ...tracer.reads.packages import home_of
from ...tracer.reads.reads import Reads, each_closure_once
from ...tracer.reads.value_keys import HOMES, one_allowance, suspects
from ...tracer.torch_private import (
    apply_now,
    hooks_are_active,
    observing_mode,
    share_memory,
    transforms_active,
)
from ...tracer.trace import CaptureError
from ..capture.captured_backward import predicted_kinds
from ..capture.guards import (
    argument_fact,
    carried_attribute,
    exact_key,
    global_state,
    has_duplicate,
    is_closure,
    is_meta,
    is_plain,
    unkeyed_state,
)
from ..fallback.answer import (
    UNDER_FUNC,
    Fault,
    FaultError,
    hand_over,
    put_on_record,
    recorded_faults,
    stack_level,
)
from ..fallback.records import Attempt, FallbackWarning, Later, NotCaptured, OpaqueCall, Record, warn
from ..settings import logs
from ..settings.config import backend_name, with_numerics
from ..settings.counters import count
from ..specialize.pipeline import require_equal, specialize
from ..specialize.residuals import ResidualPlan
from ..specialize.specialization import Specialization
from .budget import VAIN, Budget, alike
from .derived_backward import require_transposable, why_no_backward, with_derived_backward
from .function_class import fits_a_graph, with_opaque_backward
from .traceability import Traceability
from .variants import log_captured_again, log_variant

Tensor = torch.Tensor
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


_UNKNOWN: Any = object()
"""What arguments are looked up as that no call had before."""


class CallCache(Protocol):
    """The inline cache of a class's calls, as it is known here: runtime/fast_path has it."""

    forms: Any

    def forget(self) -> None:
        """What was written out for calls no longer holds."""

    def learn_form(self, signature: inspect.Signature, count: int, keywords: Any, method: Any) -> None:
        """Calls with these keywords become calls by position."""


class Compiled:
    """All that is known about one class: its specialisations by key, and the methods that stay the user's own."""

    ready: CallCache

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
        self.opaque_calls: list[OpaqueCall] = []
        self.reads: Reads | None = None
        self.marks: dict[Any, int] = {}
        self.pushes_below = False  # its own jvp is not captured under two levels of forward mode
        self.faults: dict[str, list[str]] = {}  # of ours, by method: `fallback.py`
        self.broken: set[str] = set()  # methods that run as written after too many
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
        for name in ("shown", "eager_forward"):
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
        fresh = type(self)(users, *self.options())
        with class_lock:
            kept = {**vars(fresh), "ready": self.ready, "original": original}
            vars(self).update(kept)
            for name in vars(self).keys() - kept.keys():  # attributes that were made when they were asked for
                del vars(self)[name]
        self.ready.forget()
        return users

    def __reduce__(self) -> Any:
        """For those who pickle a class by its contents (cloudpickle): what was captured stays here."""
        return type(self), (self.user_class, *self.options())

    # ------------------------------------------------------------------ calls

    def is_patient(self) -> bool:
        """Whether a capture may wait: not where it was asked for, nor where the class as written has no backward."""
        return not (self.fullgraph or self.derives_backward or self.must_capture("forward"))

    def run_users(self, failed: Attempt, args: Sequence[Any], users: Callable[..., Any]) -> Any:
        """The user's own class, and only then the record: a call that is wrong by itself raises its own error here.

        users: what runs it.
        """
        try:
            result = users(*args)
        except BaseException:
            with capture_lock:  # nothing was learnt of the method
                self.refused.pop(failed.facts, None)
                self.exact.clear()
            raise
        with recorded_faults(self, "forward", args):
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

    @lazy_attribute
    def shown(self) -> type:
        """The class as a capture around it sees it: opaque as a whole where one of its methods is declared so."""
        if not self.methods.declared_opaque():
            return self.cls
        flags = {"is_traceable": False, "traceable": dict.fromkeys(self.methods.declared, False)}
        names = {"__module__": self.cls.__module__, "__qualname__": self.cls.__qualname__}
        return type(self.cls.__name__, (self.cls,), {**flags, **names})

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
            return (exact_key(args), global_state(), reads.version, reads.facts(), self._beyond(args))

    def facts(self, args: Sequence[Any]) -> Any:
        """What has to be equal for a specialisation to be used again, sizes and strides apart."""
        reads = self.reads_now()
        with one_allowance() as is_spent:
            facts = (*map(argument_fact, args), *global_state(), reads.version, *reads.facts(), self._beyond(args))
            self.unbounded = self.unbounded or is_spent()
        return facts

    def _beyond(self, args: Sequence[Any]) -> Any:
        """The methods, and what of the arguments the methods may ask for that no graph knows."""
        return methods_now(self.user_class), self._unseen(args)

    def _unseen(self, args: Sequence[Any]) -> str | None:
        reads = self.reads_now()
        if reads.compares_identity and has_duplicate(args):
            return "it may ask whether two arguments are one tensor, which they are"
        name = carried_attribute(args, reads.custom_attributes)
        return None if name is None else f"an argument is a tensor that carries `{name}`"

    def reads_now(self) -> Reads:
        """What the methods read besides their arguments, scanned once."""
        if self.reads is None:
            with capture_lock:
                self._scan()
            assert self.reads is not None
        return self.reads

    def _scan(self) -> None:
        """What is read may have become something else (a number a tensor, a helper another): its `version` tells."""
        reads = self.methods.scan()
        self._follow_segments()
        reads.version = self.marks.setdefault(reads.signature(), len(self.marks))
        if self.reads is None or reads.version != self.reads.version:
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
            return not specialization.backward.entry(predicted_kinds(specialization.captured)).trace.opaque
        except DataMet as error:
            self.derivative_refused(error)
            return False
        except OpaqueMet:
            return False
        except CaptureError as error:
            if not any(specialization.captured.forward.needs_input_grad):
                return True  # no gradient is asked of such a call, for which forward may keep nothing
            self.refuse("backward", error)
            return False

    def capture_only(self, args: Sequence[Any], of_whole: bool = False) -> Specialization:
        """A specialization that nothing runs, for reports, exports and sharding rules. Raises CaptureError.

        of_whole: its graphs serve at the sizes of parts as well.
        """
        self.require_capturable()
        return specialize(self.cls, args, self.reads_now(), self.dynamic, of_whole=of_whole)

    def serves(self, specialization: Specialization, given: Sequence[Any]) -> bool:
        """Whether a specialisation is for arguments that share memory as these do, and is known to be right."""
        if specialization.captured.writes_inputs and share_memory(given):
            return False
        return not specialization.captured.unchecked or self._now_compared(specialization, given)

    def _now_compared(self, specialization: Specialization, args: Sequence[Any]) -> bool:
        """Whether a capture that was made on made-up data is the user's method on real data."""
        try:
            with capture_lock, torch.no_grad():
                require_equal(specialization, args)
        except CaptureError as error:
            self.give_up(args, error)
            return False
        specialization.captured.unchecked = False
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
            found = next((s for s in self.known.get(facts, ()) if s.captured.guard(tensors)), None)
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
        log_variant(self, facts, found)
        return found

    def _tried(self, facts: Any, args: Sequence[Any]) -> Specialization | CaptureError:
        try:
            if facts in self.met:
                raise self.met[facts].bare()
            log_captured_again(self, facts, args)
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
        if (why := unkeyed_state(args)) is not None:
            raise CaptureError(reason=why, where=users_line())
        if (why := self._unseen(args)) is not None:
            raise CaptureError(reason=why, where=users_line())
        self.require_capturable()
        self._require_comparable(args)
        stored, keeper = self.found_on_disk(args) if tape is None else (None, None)
        try:
            specialization = stored or self._captured_now(args, tape)
            specialization.keeper, specialization.backward.counted = keeper, self.budget.of_backward
            if self.opaque("backward") is not None:
                self._put_on_record("backward")
            elif self.must_capture("backward"):
                self._capture_predicted_backward(specialization)
        except BaseException:
            if keeper is not None:
                keeper.release()
            raise
        if keeper is not None and (specialization.captured.opaque or specialization.captured.writes_inputs):
            keeper.release()  # it will not be kept
        return specialization

    def found_on_disk(self, args: Sequence[Any]) -> tuple[Specialization | None, Any]:
        """What another process captured for such a call, and what keeps this one's: nobody here."""
        return None, None

    def _require_comparable(self, args: Sequence[Any]) -> None:
        """Raises CaptureError where no key would ever be found again; looks at functions that are arguments."""
        reads = self.reads_now()
        if reads.facts() != reads.facts():
            raise CaptureError(reason="what it reads is more than can be compared at every call", where="unknown")
        reads.add_argument_effects(suspects(args))

    def _captured_now(self, args: Sequence[Any], tape: Tape | None) -> Specialization:
        """forward traced, compared with the user's own, and prepared."""
        backend = self.backend_for(args)
        specialization = specialize(self.cls, args, self.reads_now(), self.dynamic, backend, self.report, tape)
        self.budget.spend(self.facts(args), args)
        return specialization

    def must_capture(self, role: str) -> bool:
        """Whether falling back is not allowed: asked for, and not taken back by the author for this role."""
        declared = self.methods.declared[role].value if role in self.methods.declared else None
        return self.fullgraph if declared is None else declared

    def _capture_predicted_backward(self, specialization: Specialization) -> None:
        """Where falling back is not allowed, backward's failure has to show at the call, not in the engine."""
        if backward_method(self.user_class) is None or not any(specialization.captured.forward.needs_input_grad):
            return
        try:
            specialization.backward.entry(predicted_kinds(specialization.captured))
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
            logs.log_opaque_method(f"{self.cls.__name__}.{method}", reason, where)
            message = f"{self.cls.__name__}.{method} runs as you wrote it, uncompiled: {reason} ({where})"
            warn(f"{message} [{record.code}]")

    def derivative_refused(self, error: CaptureError) -> None:
        """A derivative, or a batch of one, cannot be captured: torch's own transforms run it, on record."""
        count("fallbacks")
        if "torch.func" in self.records:
            return
        self.records["torch.func"] = record = Record("opaque", error.facts["reason"], error.facts["where"])
        warn(f"{self.cls.__name__}: a derivative is not compiled: {record.reason} ({record.where}) [{record.code}]")

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
        warn(f"{self.cls.__name__} runs as you wrote it, uncompiled: {reason} [{code_of(reason)}]")

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
        warn(f"{self.cls.__name__}.{method} {what}: {reason} [{code_of(reason)}]", stack_level())
        count("fallbacks")
        logs.log_opaque_method(f"{self.cls.__name__}.{method}", reason, where)

    def leave_to_the_user(self, method: str, reason: str) -> None:
        """What is compiled cannot serve here: the user's own class does, with the reason on record."""
        self.refuse(method, CaptureError(reason=reason, where=method_place(self.cls.forward)))  # type: ignore[attr-defined]

    def report(self, method: str, why: str) -> None:
        """A captured method runs slower than its backend promises: on record, with a warning."""
        self.records[method] = Record("compiled", why, method_place(self._method(method)))
        count("fallbacks")
        warn(f"{self.cls.__name__}.{method}: {why} [{code_of(why)}]")

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
        own = self.methods.is_opaque("backward") or specialization.backward.failed
        return backend, hooks_are_active(), own

    def chosen(self, specialization: Specialization, key: tuple[str, bool, bool], sizes: Any) -> ResidualPlan | None:
        """The cheaper residuals of a node, None where it keeps the user's own."""
        backend, observed, own = key
        free = backward_method(self.cls) is not None and not observed and not own
        return specialization.chosen(backend, sizes) if free else None


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


__all__ = ["Compiled", "FallbackWarning", "Record"]
