"""The ledger of one class: what became of each method, told with a warning once, and what was refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ...ir.codes import code_of
from ...ir.errors import NotLaunchedError, NotTraceableError, users_line
from ...tracer.capture.capture import is_capturing
from ...tracer.methods import method_place
from ...tracer.torch_private import observing_mode, transforms_active
from ...tracer.trace import CaptureError
from ..settings import logs
from ..settings.counters import count
from .answer import FaultError
from .records import OpaqueCall, Record, warn

MODES, ANOMALY, FURTHER, SHARED = "dispatch modes", "anomaly mode", "further kinds of calls", "shared memory"
"""Records that are of no method: calls under a TorchDispatchMode, double backwards under
torch.autograd.detect_anomaly, kinds of calls that wait for a capture of a class some kinds of which were refused, calls
that write to memory which is met twice."""
MET_TWICE = "it writes to memory that two arguments, or two elements of one, share"
UNLAUNCHED = re.compile(r"no kernels|\w+ (runs operation by operation|goes through torch at some sizes)")
"""Reasons why torch runs the operations of a captured method, or of a part of it, one by one."""
DEBUGGED = "anomaly mode is on, which names the operation that made a NaN"


class Methods(Protocol):
    """The class of a ledger: `compiled/user_class.py` has it."""

    cls: Any
    methods: Any

    def method(self, name: str) -> Any:
        """A method by its role."""


class Ledger:
    """Records by method, and by what else may be in the way of a call."""

    def __init__(self, user: Methods, fullgraph: bool) -> None:
        self._user, self._fullgraph = user, fullgraph
        self.records: dict[str, Record] = {}
        self.opaque_calls: list[OpaqueCall] = []
        self.faults: dict[str, list[str]] = {}
        """Mistakes of fusegrad, by method: `answer.py`."""
        self.broken: set[str] = set()
        """Methods that run in eager after too many of them."""

    def must_capture(self, role: str) -> bool:
        """True if falling back is not allowed: asked for, and not taken back by the author for this role."""
        declared = self._user.methods.declared
        value = declared[role].value if role in declared else None
        return self._fullgraph if value is None else bool(value)

    def record_of(self, method: str, error: CaptureError) -> Record:
        """The record of a failed capture."""
        reason, where = error.facts["reason"], error.facts["where"]
        return Record("opaque", reason, self._place(method) if where == "unknown" else where)

    def _place(self, method: str) -> str:
        return method_place(self._user.method(method))

    # ------------------------------------------------------------------ captures
    def note_compiled(self, method: str) -> None:
        """A method was captured; what became of it before stays on record."""
        self.records.setdefault(method, Record("compiled"))

    def note_steps(self, method: str, reasons: Sequence[str]) -> None:
        """Loops over a size are traced step by step: on record, where nothing else is."""
        self.note_steps_in(self.records, method, reasons)

    def note_steps_in(self, records: dict[str, Record], method: str, reasons: Sequence[str]) -> None:
        """The same in records of a report, which are not kept."""
        if reasons and records.get(method, Record("compiled")) == Record("compiled"):
            why = f"a loop is traced step by step: {reasons[0]}"
            records[method] = Record("compiled", why, self._place(method))

    def note_opaque(self, role: str, error: CaptureError | None) -> None:
        """A role that must not be captured: with a warning, but for one that was declared so."""
        if error is not None and self._user.methods.declared[role].value is False:
            self.records[role] = self.record_of(role, error)
        elif error is not None:
            self.refuse(role, error)

    def refuse(self, method: str, error: CaptureError) -> None:
        """Put a failed capture on record; raise NotTraceableError where the user asked for that."""
        record, name = self.record_of(method, error), self._user.cls.__name__
        reason, where = record.reason, record.where
        if self.must_capture(method):
            raise NotTraceableError(function=name, method=method, reason=reason, where=where) from error
        if method not in self.records or self.records[method].status != "opaque":
            self.records[method] = record
            count("fallbacks")
            logs.log_opaque_method(f"{name}.{method}", reason, where)
            warn(f"{name}.{method} falls back to eager: {reason} ({where}) [{record.code}]")

    def refuse_derivative(self, error: CaptureError) -> None:
        """A derivative, or a batch of one, cannot be captured: torch's own transforms run it, on record."""
        count("fallbacks")
        if "torch.func" in self.records:
            return
        self.records["torch.func"] = record = Record("opaque", error.facts["reason"], error.facts["where"])
        name = self._user.cls.__name__
        warn(f"{name}: a derivative is not compiled: {record.reason} ({record.where}) [{record.code}]")

    def note_no_rules(self, error: CaptureError) -> str:
        """torch.func refuses the class, and no rules are derived of it: on record; the reason and its place."""
        record = self.record_of("forward", error)
        self.records.setdefault("torch.func", record)
        return f"{record.reason} ({record.where}) [{record.code}]"

    def note_waiting(self, why: str, is_vain: bool) -> None:
        """A capture waits until calls of its kind came often: on record, with a warning where that is long.

        is_vain: captures of the class failed so far, which is on record already.
        """
        if self.records.get("forward", Record("")).status == "opaque":
            self.records.setdefault(FURTHER, Record("opaque", why, self._place("forward")))
        elif is_vain:
            self.records["forward"] = Record("compiled", why, self._place("forward"))
        else:
            self.report_once("forward", why)

    # ------------------------------------------------------------------ what runs
    def report(self, method: str, why: str) -> None:
        """A captured method runs slower than its backend promises: on record, with a warning.

        Raises NotLaunchedError where the user asked for kernels and none may run.
        """
        name, place = self._user.cls.__name__, self._place(method)
        if UNLAUNCHED.match(why) and self.must_capture(method):
            raise NotLaunchedError(function=name, method=method, reason=why, where=place)
        self.records[method] = Record("compiled", why, place)
        count("fallbacks")
        warn(f"{name}.{method}: {why} [{code_of(why)}]")

    def report_once(self, method: str, why: str) -> None:
        """The same, at the first time."""
        if self.records.get(method, Record("")).reason != why:
            self.report(method, why)

    def note_fault(self, method: str, reason: str, status: str) -> None:
        """A mistake of ours in a call, which the user's own method answered: on record, with a warning.

        Raises FaultError where it must not run.
        """
        name = self._user.cls.__name__
        where = self._place(method if method in ("forward", "backward") else "forward")
        if self.must_capture(method):
            raise FaultError(function=name, method=method, reason=reason, where=where)
        self.records[method] = Record(status, reason, where)
        outcome = "falls back to eager" if status == "opaque" else "goes another way"
        warn(f"{name}.{method} {outcome}: {reason} [{code_of(reason)}]")
        count("fallbacks")
        logs.log_opaque_method(f"{name}.{method}", reason, where)

    def note_observed(self) -> None:
        """A TorchDispatchMode (a selective checkpoint, a counter) is to see the class's own operations: on record."""
        if MODES in self.records or (mode := observing_mode()) is None:
            return
        reason = f"a TorchDispatchMode ({mode}) is active, which is to see the operations of the class"
        self._note_calls(MODES, reason, users_line())

    def note_shared_memory(self) -> None:
        """A call writes where another argument, or element, is read: eager's order of both is the user's. On record."""
        if SHARED not in self.records:
            self._note_calls(SHARED, MET_TWICE, self._place("forward"))

    def _note_calls(self, kind: str, reason: str, where: str | None) -> None:
        """Calls of a kind that run in eager whatever became of the methods: on record, with a warning."""
        self.records[kind] = Record("opaque", reason, where)
        count("fallbacks")
        warn(f"{self._user.cls.__name__} falls back to eager: {reason} [{code_of(reason)}]")

    def is_in_anomaly_mode(self) -> bool:
        """True if anomaly mode, which warns itself, is to see the operations of a backward that is differentiated."""
        if not torch.is_anomaly_enabled() or is_capturing() or transforms_active():
            return False
        if ANOMALY not in self.records:
            self.records[ANOMALY] = Record("opaque", DEBUGGED, users_line())
            count("fallbacks")
        return True
