"""One compiled class: its options, the user's class, the table of its specializations, and the ledger of the rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ...ir.switches import use_switch_state
from ...tracer.capture.capture import capture_lock, is_capturing
from ...tracer.locks import CLASS, lock_of
from ...tracer.methods import backward_method
from ...tracer.reads.reads import each_closure_once
from ...tracer.torch_private import hooks_are_active, is_fake
from ...tracer.trace import CaptureError
from ..capture.guards import is_closure, is_meta
from ..fallback.answer import recorded_faults
from ..fallback.ledger import Ledger
from ..fallback.records import Attempt, Later
from ..specialize.pipeline import prepare, require_equal
from ..specialize.residuals import ResidualPlan
from ..specialize.specialization import Specialization
from .budget import Budget
from .captures import Captures
from .function_class import fits_a_graph
from .keys import Keys
from .options import Options
from .table import SpecializationTable
from .user_class import CallCache, UserClass

class_lock = lock_of(CLASS)
_UNKNOWN: Any = object()
"""What arguments are looked up as that no call had before."""


class Compiled:
    """The parts of one compiled class, and what they decide together."""

    inline_cache: CallCache
    options: Options
    user: UserClass
    keys: Keys
    table: SpecializationTable
    ledger: Ledger
    budget: Budget
    captures: Captures
    fits_a_graph: bool
    sharding_rules: OrderedDict[Any, Any]
    pushes_below: bool
    eager_forward: tuple[type, Callable[..., Any]] | None
    """The class as it was when it was made, and forward as written before a backward that is captured by itself."""

    def __init__(self, cls: type, options: Options) -> None:
        vars(self).update(self._parts(cls, options))

    def _parts(self, cls: type, options: Options) -> dict[str, Any]:
        """All attributes, but for the inline cache, for which the class is the same when methods are assigned."""
        user = UserClass(cls, options, self.inline_cache)
        keys, table = Keys(user, self.inline_cache, options), SpecializationTable()
        ledger = Ledger(user, options.fullgraph)
        budget = Budget(cls)
        for role in user.methods.declared_opaque():
            ledger.note_opaque(role, keys.opaque(role))
        return {
            "options": options,
            "user": user,
            "keys": keys,
            "table": table,
            "ledger": ledger,
            "budget": budget,
            "captures": Captures(options, user, keys, table, ledger, budget, self.stored),
            "fits_a_graph": fits_a_graph(cls, user.methods),
            "sharding_rules": OrderedDict(),  # how DTensors are divided
            "pushes_below": False,  # its own jvp is not captured under two levels of forward mode
            "eager_forward": None,
        }

    def begin_again(self, assigned: dict[str, Any]) -> type:
        """Methods were assigned to the compiled class: from now on it stands for the class that is returned."""
        original: type = getattr(self, "original", self.user.original)
        names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        users = type(original.__name__, (original,), {**names, **assigned}) if assigned else original
        parts = self._parts(users, self.options)
        with class_lock:  # in one step, for threads that call it
            vars(self).update(parts, original=original)
        self.inline_cache.forget()
        return users

    def __reduce__(self) -> Any:
        """For those who pickle a class by its contents (cloudpickle): what was captured stays here."""
        return type(self), (self.user.original, self.options)

    def stored(self, args: Sequence[Any]) -> tuple[Specialization | None, Any]:
        """The capture of another process for such a call, and the keeper of this one's: none here."""
        return None, None

    # ------------------------------------------------------------------ specializations
    def specialization(self, args: Sequence[Any], patient: bool = False) -> Specialization | None:
        """The specialization that fits these arguments, captured if need be; None: the user's own methods run.

        Raises NotCaptured at the first call for which they have to. patient: raises Later where it costs too much.
        """
        if self._is_hopeless() and not self.ledger.must_capture("forward"):
            return None  # whatever a key would say
        if patient and (why := self.budget.why_not_begun()) is not None:
            raise Later(why)
        is_first = self.keys.reads is None
        with each_closure_once() if any(map(is_closure, args)) else nullcontext():
            key = self.keys.exact(args)
            spec = self.table.by_call.get(key, _UNKNOWN)
            return spec if spec is not _UNKNOWN else self._look_up(key, args, patient, not is_first)

    def _look_up(self, key: Any, args: Sequence[Any], patient: bool, scan: bool) -> Specialization | None:
        """The specialization for a key that no call had. scan: the methods may read more than they did."""
        with capture_lock, each_closure_once():
            facts = self.keys.facts(args)
            if patient and facts not in self.table.by_facts:
                self._require_worth(facts, args)
            if facts not in self.table.by_facts and scan and self.keys.scan():
                key, facts = self.keys.exact(args), self.keys.facts(args)
            spec = self.table.lookup(facts, args)
            if patient and spec is None:
                self.table.expect_opaque_node(facts)
            is_refused = facts in self.table.refused or self._is_hopeless() or any(map(is_meta, args))
            if spec is None and not is_refused:
                if patient and facts in self.table.by_facts:  # for other sizes
                    self._require_worth(facts, args)
                spec, key = self.captures.enter(key, facts, args)
            if spec is not None:
                spec = self._for_long_loops(spec, args)
            self.table.set_for_call(key, spec)
            return spec

    def _for_long_loops(self, spec: Specialization, args: Sequence[Any]) -> Specialization | None:
        """The specialization, compared with the user's own method where loops are longer than all before; where that
        does something else in late steps, another one, for this length alone."""
        captured = spec.captured
        if not captured.longest.lengths or is_capturing() or any(map(is_fake, args)):
            return spec
        if not captured.longest.are_longer(captured.sizes(args)):
            return spec
        try:
            _require_equal(spec, args)
        except CaptureError as error:
            return self._step_by_step(args, error)
        return spec

    def _step_by_step(self, args: Sequence[Any], error: CaptureError) -> Specialization | None:
        try:
            return self.captures.enter_step_by_step(args)
        except CaptureError:
            self.give_up(args, error)
            return None

    def _is_hopeless(self) -> bool:
        return self.table.is_hopeless(self.keys.is_unbounded)

    def _require_worth(self, facts: Any, args: Sequence[Any]) -> None:
        """Raises Later where a capture for such a call has to wait."""
        if facts not in self.table.refused and (why := self.budget.why_later(facts, args)) is not None:
            raise Later(why)

    def is_patient(self) -> bool:
        """True if a capture may wait: not where it was asked for, nor where the class as written has no backward."""
        return not (self.options.fullgraph or self.user.derives_backward or self.ledger.must_capture("forward"))

    def give_up(self, args: Sequence[Any], error: CaptureError) -> None:
        """Calls with arguments like these run as the user wrote them."""
        self.ledger.refuse("forward", error)
        self.table.refuse(self.keys.exact(args), self.keys.facts(args), error)

    def run_refused(self, failed: Attempt, args: Sequence[Any], eager: Callable[..., Any]) -> Any:
        """The user's own class, and only then the record: a call that is wrong by itself raises its own error here."""
        try:
            result = eager(*args)
        except BaseException:
            with capture_lock:
                self.table.forget_refusal(failed.facts)
            raise
        with recorded_faults(self, "forward", args):
            self.ledger.refuse("forward", failed.error)
            self.table.refuse(failed.key, failed.facts, failed.error)
        return result

    # ------------------------------------------------------------------ whether a specialization serves
    def serves(self, specialization: Specialization, args: Sequence[Any]) -> bool:
        """True if a specialization is for arguments that share memory as these do, and is known to be right."""
        captured = specialization.captured
        if captured.writes_shared_memory(args):
            self.ledger.note_shared_memory()
            return False
        if not captured.unchecked:
            return True
        # It was captured on made-up data: compared with the user's method on real data now.
        captured.unchecked = not self._is_equal(specialization, args)
        return not captured.unchecked

    def _is_equal(self, specialization: Specialization, args: Sequence[Any]) -> bool:
        """True if a specialization is the user's method on these arguments; else that runs, on record."""
        try:
            _require_equal(specialization, args)
        except CaptureError as error:
            self.give_up(args, error)
            return False
        return True

    def node_key(self, specialization: Specialization, backend: str) -> tuple[str, bool, bool]:
        """The key of a generated Function among those of a specialization: backend, hooks, whose backward it is."""
        own = self.user.methods.is_opaque("backward") or specialization.backward.failed
        return backend, hooks_are_active(), own

    def prepare(
        self, specialization: Specialization, key: tuple[str, bool, bool], sizes: Any
    ) -> tuple[str, ResidualPlan | None]:
        """The rest of the pipeline, at the sizes of a node's first call: the backend that serves, and the residuals.

        None for the user's own residuals.
        """
        backend, is_observed, is_own_backward = key
        keeps_own = backward_method(self.user.cls) is None or is_observed or is_own_backward
        with use_switch_state(specialization.captured.switches):
            return prepare(specialization, backend, sizes, keeps_own)


def _require_equal(specialization: Specialization, args: Sequence[Any]) -> None:
    """Raises CaptureError where a specialization is not the user's method on these arguments."""
    with capture_lock, torch.no_grad():
        require_equal(specialization, args)


__all__ = ["Compiled", "class_lock"]
