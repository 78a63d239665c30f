"""The captures of one class: tried at the first call of a kind, stored ones first, and each failure on record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...ir.errors import users_line
from ...ir.switches import with_slab_bytes
from ...tracer.capture.capture import DataReadError, OpaqueCallError
from ...tracer.loops.lengths import FEWEST
from ...tracer.methods import backward_method
from ...tracer.opaque.opaque import Tape
from ...tracer.trace import CaptureError
from ..capture.captured_backward import predicted_kinds
from ..capture.guards import is_plain, unkeyed_state
from ..fallback.ledger import Ledger
from ..fallback.records import Attempt, NotCaptured
from ..specialize.pipeline import specialize
from ..specialize.specialization import Specialization
from .budget import Budget
from .keys import Keys
from .options import Options
from .slips import warn_of_slips
from .table import SpecializationTable
from .user_class import UserClass
from .variants import log_captured_again, log_variant

VARIANTS = 64
"""Keys other than sizes (dtypes, constants, ...) that a class is captured for; beyond them its own methods run."""
Stored = Callable[[Sequence[Any]], tuple[Specialization | None, Any]]
"""What another process captured for such a call, and what keeps this one's capture for others."""


class Captures:
    """Makes the specializations of one class and enters them in its table."""

    def __init__(
        self,
        options: Options,
        user: UserClass,
        keys: Keys,
        table: SpecializationTable,
        ledger: Ledger,
        budget: Budget,
        stored: Stored,
    ) -> None:
        self.options, self.user, self.keys, self.table = options, user, keys, table
        self.ledger, self.budget, self.stored = ledger, budget, stored

    def enter(self, key: Any, facts: Any, args: Sequence[Any]) -> tuple[Specialization, Any]:
        """A new specialization, in the table, and its exact key. Raises NotCaptured.

        What cannot be captured is taken out of the methods, as far as that helps.
        """
        while True:
            try:
                return self._entered(key, facts, args), self.keys.exact(args)
            except NotCaptured as missing:
                error = missing.attempt.error
                if isinstance(error, OpaqueCallError) or not self.keys.take_out("forward", error):
                    raise
                self.table.refused.pop(facts, None)
                key, facts = self.keys.exact(args), self.keys.facts(args)

    def _entered(self, key: Any, facts: Any, args: Sequence[Any]) -> Specialization:
        """A specialization for arguments like these; raises NotCaptured, and no error of the user's comes with ours."""
        attempt = self._attempt(facts, args)
        if isinstance(attempt, CaptureError):
            raise NotCaptured(Attempt(attempt, key, facts))
        facts = self.keys.facts(args)  # a capture that came to functions of other packages compares what these read
        self.table.add(facts, attempt)
        self.ledger.note_compiled("forward")
        warn_of_slips(attempt.captured)
        log_variant(self, facts, attempt)
        return attempt

    def _attempt(self, facts: Any, args: Sequence[Any]) -> Specialization | CaptureError:
        try:
            if facts in self.table.opaque_nodes:
                raise self.table.opaque_nodes[facts].without_frames()
            log_captured_again(self, facts, args)
            with self.budget.attempt():
                return self._capture(args)
        except CaptureError as error:
            opaque = isinstance(error, OpaqueCallError) and not isinstance(error, DataReadError)
            if self.options.fullgraph if opaque else self.ledger.must_capture("forward"):
                self.ledger.refuse("forward", error)
            if isinstance(error, OpaqueCallError):
                self.table.add_opaque_node(facts, error)
            else:
                self.table.refused[facts] = error.without_frames()  # at once: other threads wait for this attempt
            return error.without_frames()

    def enter_split(self, args: Sequence[Any], tape: Tape) -> Specialization:
        """A specialization with opaque nodes, whose results are on the tape; chosen first from now on."""
        with self.budget.attempt():
            specialization = self._capture(args, tape)
        self.table.add(self.keys.facts(args), specialization, first=True)
        self.ledger.note_compiled("forward")
        self.table.set_for_call(self.keys.exact(args), specialization)
        return specialization

    def enter_step_by_step(self, args: Sequence[Any]) -> Specialization:
        """A specialization for loops as long as these alone, traced step by step; chosen first from now on.

        Raises CaptureError.
        """
        with self.budget.attempt():
            specialization = self._capture(args, rolls=0)
        self.table.add(self.keys.facts(args), specialization, first=True)
        self.ledger.note_compiled("forward")
        return specialization

    def only(self, args: Sequence[Any], of_whole: bool = False, rolls: int | None = None) -> Specialization:
        """A specialization that nothing runs, for reports, exports and sharding rules. Raises CaptureError.

        of_whole: its graphs serve at the sizes of parts as well. rolls: 0 traces all loops step by step.
        """
        self.keys.require_capturable()
        with with_slab_bytes(self.options.slab_bytes):
            reads, dynamic = self.keys.reads_now(), self.options.dynamic
            return specialize(self.user.cls, args, reads, dynamic, of_whole=of_whole, rolls=rolls)

    def _capture(self, args: Sequence[Any], tape: Tape | None = None, rolls: int | None = None) -> Specialization:
        self._require_supported(args)
        self.keys.require_capturable()
        self.keys.require_comparable(args)
        stored, keeper = self.stored(args) if tape is None and rolls is None else (None, None)
        try:
            specialization = stored or self._specialize(args, tape, rolls)
            specialization.keeper, specialization.backward.counted = keeper, self.budget.of_backward
            specialization.backward.follow_methods = partial(self._follow_methods, specialization)
            specialization.backward.note_steps = partial(self.ledger.note_steps, "backward")
            # Where backward may not fall back its failure has to show at the call, not in the engine.
            if (error := self.keys.opaque("backward")) is not None:
                self.ledger.note_opaque("backward", error)
            elif self.ledger.must_capture("backward"):
                self._capture_predicted_backward(specialization)
        except BaseException:
            if keeper is not None:
                keeper.release()
            raise
        if keeper is not None and (specialization.captured.opaque or specialization.captured.writes_inputs):
            keeper.release()  # it will not be kept
        return specialization

    def _follow_methods(self, specialization: Specialization) -> None:
        """Where what the methods read is not what it was at forward's capture, backward is the class's as it is now.

        Raises CaptureError where that must not be captured.
        """
        captured = specialization.captured
        if captured.outside_state() == captured.outside_at_capture:
            return
        self.keys.scan()
        if captured.cls is not self.user.cls or captured.reads.version != self.keys.reads_now().version:
            specialization.adopt(self.user.cls, self.keys.reads_now())
        if (error := self.keys.opaque("backward")) is not None:
            raise error

    def _require_supported(self, args: Sequence[Any]) -> None:
        """Raises CaptureError where the table is full, or an argument is nothing that a graph stands for."""
        if len(self.table.by_facts) >= VARIANTS:
            reason = (
                f"it is traced for {VARIANTS} combinations of constants and dtypes already; "
                "pass a number that changes at every call as a 0-d tensor"
            )
            raise CaptureError(reason=reason, where=users_line())
        if not all(is_plain(a) for a in args if isinstance(a, torch.Tensor)):
            raise CaptureError(reason="an argument is a tensor subclass or not strided", where=users_line())
        for why in (unkeyed_state(args), self.keys.why_unkeyed(args)):
            if why is not None:
                raise CaptureError(reason=why, where=users_line())

    def _specialize(self, args: Sequence[Any], tape: Tape | None, rolls: int | None) -> Specialization:
        """The whole pipeline, for a backend that runs. rolls: loops of at least so many steps, or none at all (0)."""
        backend, reads, dynamic = self.options.backend_for(args), self.keys.reads_now(), self.options.dynamic
        rolls = FEWEST if rolls is None and self._has_short_loops(args) else rolls
        made = specialize(self.user.cls, args, reads, dynamic, backend, self.ledger.report, tape, rolls=rolls)
        self.ledger.note_steps("forward", made.captured.session.take_unrolled())
        self.budget.spend(self.keys.facts(args), args)
        return made

    def _has_short_loops(self, args: Sequence[Any]) -> bool:
        """True if a loop of few steps was traced step by step, for a length that is not that of these arguments."""
        known = self.table.by_facts.get(self.keys.facts(args), ())
        traced = (spec.captured for spec in known if spec.captured.forward.is_traced)
        return any(captured.session.env.is_cut_short for captured in traced)

    def _capture_predicted_backward(self, specialization: Specialization) -> None:
        """Backward for gradients as forward's results are, where falling back is not allowed."""
        captured = specialization.captured
        if backward_method(self.user.original) is None or not any(captured.forward.needs_input_grad):
            return
        try:
            specialization.backward.entry(predicted_kinds(captured))
        except CaptureError as error:
            if self.options.fullgraph or isinstance(error, DataReadError) or not isinstance(error, OpaqueCallError):
                self.ledger.refuse("backward", error)
