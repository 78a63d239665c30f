"""backward of a specialization: a graph per combination of gradients, lowered on the backends that ran it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sympy
import torch

from ...ir import Graph
from ...ir.lazy_attribute import lazy_attribute
from ...ir.switches import use_switch_state
from ...tracer.capture.capture import OpaqueCallError, capture_lock
from ...tracer.function import rebind
from ...tracer.loops.lengths import FEWEST
from ...tracer.loops.reasons import LATE_STEPS
from ...tracer.methods import backward_method
from ...tracer.opaque.opaque import Mismatch, Tape
from ...tracer.torch_private import FakeTensorMode, plain_tensors
from ...tracer.trace import CaptureError
from ..capture.captured import CapturedFunction, capture_function
from ..capture.captured_backward import BackwardEntry, admits_sizes, capture_backward, predicted_kinds
from ..capture.first_call_check import check_backward
from ..capture.opaque_replay import VARIANTS as MOST_GRAPHS
from ..capture.opaque_replay import running_with_tape
from ..capture.outputs import view_like
from ..execution.executable import Executable
from ..fallback.effects import drawing_again
from ..settings.config import AS_TRACED, KERNEL_BACKENDS
from ..settings.internal_errors import or_fall_back
from ..values.gradient_layouts import canonical_layout, layout_class
from ..values.sizes import BoundSizes
from .residuals import ResidualPlan, executable_key

Tensor = torch.Tensor
Sizes = BoundSizes
_AS_IT_IS = nullcontext()


@dataclass(frozen=True, eq=False)
class BackwardCall:
    """One run of backward on plain tensors."""

    backend: str
    residuals: Sequence[Any]
    """What forward kept: the user's saved tensors, or those that were chosen."""
    sizes: Sizes
    """Those of forward's call."""
    gradients: Sequence[Any]
    chosen: ResidualPlan | None = None
    ctx: Any = None
    """The node's, for what the user's backward leaves there."""

    @lazy_attribute
    def originals(self) -> Sequence[Any]:
        """The user's own residuals, computed again where cheaper ones were kept."""
        return self.residuals if self.chosen is None else self.chosen.rebuilt(self.residuals, self.sizes)

    @lazy_attribute
    def canonical(self) -> list[Tensor | None]:
        """The gradients in layouts that graphs are captured for."""
        return [canonical_layout(g) for g in self.gradients]

    @lazy_attribute
    def kinds(self) -> tuple[Any, ...]:
        """The layouts of the gradients, None for absent ones: what a captured backward is found by."""
        return tuple(layout_class(g) for g in self.canonical)

    @lazy_attribute
    def key(self) -> str:
        """The key of an executable among those of one captured backward."""
        return executable_key(self.backend, self.chosen)

    def on_originals(self) -> BackwardCall:
        """The same call on the user's own residuals."""
        return self if self.chosen is None else replace(self, residuals=self.originals, chosen=None)


class Backward:
    """The captured backwards of one specialization."""

    counted: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    """Where a capture of backward runs, so that its operations count (`budget.py`)."""

    follow_methods: Callable[[], None] = staticmethod(lambda: None)
    """Reads the methods again before a capture of backward: other ones may have been assigned since forward."""

    note_steps: Callable[[Sequence[str]], None] = staticmethod(lambda reasons: None)
    """Is told why loops of it were traced step by step."""

    def __init__(self, captured: CapturedFunction, of_whole: bool = False) -> None:
        """of_whole: its graphs run at sizes of parts, at which the method itself may do another thing."""
        self.captured, self.of_whole = captured, of_whole
        self.find_stored: Callable[[tuple[Any, ...]], BackwardEntry | None] | None = None  # on disk, without a capture
        self.entries: dict[Any, BackwardEntry | CaptureError] = {}
        self.siblings: list[tuple[Backward, list[Any]]] = []
        self.failed = False  # then the user's own runs, from the next call on
        self.faulty = False  # the same, and for the calls before

    def entry(self, kinds: tuple[Any, ...]) -> BackwardEntry:
        """The captured backward for these gradients; raises CaptureError (the same each time) where it cannot be."""
        key = self.key_now(kinds)
        if key not in self.entries:
            with capture_lock, use_switch_state(self.captured.switches):
                self.follow_methods()
                key = self._add_entry(self.key_now(kinds), kinds)
        entry = self.entries[key]
        if isinstance(entry, CaptureError):
            raise entry.without_frames()
        if self.of_whole:
            entry.serves_all_sizes = entry.is_checked = True
        return entry

    @property
    def serves(self) -> bool:
        """True if gradients come from a captured backward, of some kind at least."""
        return any(isinstance(e, BackwardEntry) and e.executables for e in self.entries.values())

    def key_now(self, kinds: tuple[Any, ...]) -> Any:
        """The key of a backward: its gradients, and what is read from outside, which may change after forward."""
        cls = self.captured.cls
        return kinds, *self.captured.outside_state(), backward_method(cls), cls.jvp  # type: ignore[attr-defined]

    def add_split_entry(self, call: BackwardCall, tape: Tape) -> BackwardEntry | None:
        """Capture backward with opaque nodes, whose results are on the tape, and compare it at once."""
        kinds = call.kinds
        key, others = self.key_now(kinds), self.other_entries(kinds)
        if len(others) >= MOST_GRAPHS:
            return None
        self.captured.session.move_to(call.sizes)
        try:
            with self.counted():
                entry = capture_backward(self.captured, kinds, tape.rewound_tape())
            self.compare(call, entry, tape)
        except CaptureError as error:
            self.entries[key] = error.without_frames()
            self.failed = self.failed or not isinstance(error, OpaqueCallError)
            raise
        entry.alternatives, entry.is_checked = others, True
        self.entries[self.key_now(kinds)] = entry  # the capture may have found more that backward reads
        if entry.guards:  # no other capture of it is made beside this one: calls of other sizes begin anew
            self.captured.guard = self.captured.current_guard()
        return entry

    def other_entries(self, kinds: tuple[Any, ...]) -> list[BackwardEntry]:
        """The captures of backward for these gradients, newest first."""
        known = self.entries.get(self.key_now(kinds))
        return [known, *known.alternatives] if isinstance(known, BackwardEntry) else []

    def executable(self, call: BackwardCall, entry: BackwardEntry, compares: bool = True) -> Executable:
        """A captured backward on the call's residuals and backend, compared with the user's own and lowered once."""
        if call.key not in entry.executables:
            _ = call.originals  # by kernels, not within the lock
            with capture_lock, use_switch_state(self.captured.switches):
                if call.key not in entry.executables:  # no other thread was first
                    if compares:
                        self.compare(call, entry)
                    executable = executable_for(self, entry, call)
                    entry.assume(self.captured.session.conditions(self.captured.symbols, entry.since))
                    entry.executables[call.key] = executable
        return entry.executables[call.key]

    def compare_longer(self, call: BackwardCall, entry: BackwardEntry) -> None:
        """Compares a backward again whose loop is longer than it ever was; where it is not it, one that is traced step
        by step takes these sizes, and of many such sizes the user's own. Raises CaptureError."""
        if entry.longest.are_longer(call.sizes):
            with capture_lock, use_switch_state(self.captured.switches):
                try:
                    check_backward(self.captured, entry, call.originals, call.sizes, call.canonical)
                except CaptureError as error:
                    if len(entry.refused_sizes) >= MOST_GRAPHS:
                        self.entries[self.key_now(call.kinds)], self.failed = error.without_frames(), True
                        raise
                    entry.refused_sizes.add(call.sizes.key)
                    self.note_steps([LATE_STEPS])

    def is_split(self) -> bool:
        """True if the commonest backward has opaque nodes."""
        try:
            with plain_tensors(), torch.no_grad():
                return bool(self.entry(predicted_kinds(self.captured)).trace.opaque)
        except OpaqueCallError:
            return True
        except CaptureError:
            return False

    def _add_entry(self, key: Any, kinds: tuple[Any, ...]) -> Any:
        """Captures backward, if no other thread was first; its key, with what the capture found that it reads."""
        if key in self.entries:
            return key
        if self.find_stored is not None and (stored := self.find_stored(kinds)) is not None:
            self.entries[key] = stored
            return key
        try:
            with self.counted():
                found = capture_backward(self.captured, kinds)
            self.note_steps(self.captured.session.take_unrolled())
            key = self.key_now(kinds)
            self.entries[key] = found
        except CaptureError as error:
            self.entries[key] = error.without_frames()
            self.failed = self.failed or not isinstance(error, OpaqueCallError)
        return key

    def compare(self, call: BackwardCall, entry: BackwardEntry, tape: Tape | None = None) -> None:
        """The first call's comparison with the user's own backward; where they differ, that runs from now on."""
        try:
            check_backward(self.captured, entry, call.originals, call.sizes, call.canonical, tape)
        except CaptureError as error:
            self.entries[self.key_now(call.kinds)], self.failed = error.without_frames(), True
            raise

    def entry_at(self, kinds: tuple[Any, ...], sizes: Sizes) -> tuple[Backward, BackwardEntry] | None:
        """The backward that runs at these sizes, and whose it is; None where that is found out by running it."""
        entry = self.entry(kinds)
        if entry.admits(sizes):
            return self, entry
        if entry.opaque:
            return None
        added = next((other for other in entry.alternatives if other.admits(sizes) and not other.opaque), None)
        if added is not None:
            return self, added
        sibling, args = self.sibling_at(sizes)
        return sibling.entry_at(kinds, sibling.captured.sizes(args))

    def sibling_at(self, sizes: Sizes) -> tuple[Backward, list[Any]]:
        """A capture that is for these sizes, and arguments that have them. Raises CaptureError."""
        for sibling, args in self.siblings:
            if all(_same_shape(a, f, sizes) for a, f in zip(args, self.captured.forward.fakes, strict=True)):
                return sibling, args
        args = [_stand_in(f, sizes) for f in self.captured.forward.fakes]
        for sibling, _ in self.siblings:
            if sibling.has_entry_for(sibling.captured.sizes(args)):
                return sibling, args
        sibling = Backward(self._captured_again(args))
        self.siblings.append((sibling, args))
        return sibling, args

    def has_entry_for(self, sizes: Sizes) -> bool:
        """True if a backward that was captured is for these sizes."""
        known = (e for e in self.entries.values() if isinstance(e, BackwardEntry))
        return admits_sizes(self.captured, sizes) and any(e.admits(sizes) for e in known)

    def _captured_again(self, args: Sequence[Any]) -> CapturedFunction:
        """Forward's capture at the sizes of these arguments, which keeps the same. Raises CaptureError.

        A loop that was traced step by step turned out to have several lengths: it is one node if it can be.
        """
        own = self.captured
        whole, rolls = own.with_tensors(args), min(FEWEST, own.session.env.rolls)
        for fewest in dict.fromkeys((rolls, 0)):
            again = capture_function(own.cls, whole, own.reads, own.dynamic, own.report, rolls=fewest)
            if again.residual_places == own.residual_places:
                return again
        raise CaptureError(reason="what it saves depends on the sizes", where="unknown")


def is_apart(backward: Backward) -> bool:
    """True if the user's own backward is what is differentiated: it has opaque nodes, or is given a number that
    forward read from a tensor."""
    return any(not s.is_integer for s in backward.captured.backward_symbols) or backward.is_split()


def opaque_hints(backward: Backward) -> dict[sympy.Symbol, int]:
    """The sizes that opaque nodes returned when they were captured."""
    entries = [e for e in backward.entries.values() if isinstance(e, BackwardEntry)]
    opaque = [*backward.captured.opaque, *(node for entry in entries for node in entry.trace.opaque)]
    return {s: n for node in opaque for s, n in node.hints.items()}


def known_kinds(backward: Backward) -> tuple[Any, ...]:
    """The gradients to explain backward for: the commonest; with opaque nodes, those that it was called with."""
    predicted = predicted_kinds(backward.captured)
    if isinstance(backward.entries.get(backward.key_now(predicted)), BackwardEntry):
        return predicted
    split_for = [k[0] for k, e in backward.entries.items() if isinstance(e, BackwardEntry) and e.trace.opaque]
    return split_for[-1] if split_for else predicted


def is_for_other_sizes(backward: Backward, kinds: tuple[Any, ...], sizes: Sizes) -> bool:
    """True if no backward can be made for these: of a forward with opaque nodes there is no capture beside it."""
    known = backward.other_entries(kinds)
    fits = admits_sizes(backward.captured, sizes) or any(entry.opaque or entry.admits(sizes) for entry in known)
    return bool(backward.captured.opaque and known) and not fits


def run(backward: Backward, call: BackwardCall) -> tuple[Any, ...]:
    """The gradients, from kernels. Raises CaptureError where the user's own body has to run instead."""
    entry = backward.entry(call.kinds)
    if entry.admits(call.sizes):
        backward.executable(call, entry)  # lowering may add to what it admits
        backward.compare_longer(call, entry)
    if entry.admits(call.sizes):
        return run_entry(backward, entry, call)
    if entry.opaque:
        raise Mismatch(backward.captured.name, Tape())
    sibling, args = backward.sibling_at(call.sizes)
    at_sizes = replace(call.on_originals(), sizes=sibling.captured.sizes(args), gradients=call.canonical)
    return run(sibling, at_sizes)


def run_entry(
    backward: Backward, entry: BackwardEntry, call: BackwardCall, tape: Tape | None = None
) -> tuple[Any, ...]:
    """The gradients from one captured backward. tape: results of its opaque nodes that there are already."""
    executable, sizes, given = entry.executables[call.key], call.sizes, call.gradients
    captured = backward.captured
    symbols = [sizes[s] for s in captured.backward_symbols]
    inputs = [v for v in (*call.residuals, *symbols, *given) if v is not None]
    by_torch = executable.backend in ("reference", AS_TRACED)
    for i in range(len(inputs) - sum(g is not None for g in given), len(inputs)):
        if not (by_torch and entry.takes_gaps[i]):
            inputs[i] = canonical_layout(inputs[i])
    for i in entry.unversioned_inputs:
        inputs[i] = inputs[i].data
    lifted = [r.get() for r in entry.lifted if r is not None]
    again = running_with_tape(executable, tape, sizes) if entry.opaque else nullcontext(sizes)
    with again as now, captured.without_added_casts(), drawing_again(inputs) if entry.draws else _AS_IT_IS:
        results = executable(inputs, lifted, now)

    def view(fake: Tensor, gradient: Any) -> Tensor:
        return view_like(fake, canonical_layout(gradient), sizes)  # type: ignore[arg-type]

    return tuple(entry.with_passed_gradients(results, given, executable.backend, view))


def executable_for(backward: Backward, entry: BackwardEntry, call: BackwardCall) -> Executable:
    """A captured backward on the call's backend, from the user's residuals, or from those that were chosen."""
    captured, backend = backward.captured, call.backend
    name, report = f"{captured.name}_backward", partial(captured.report, "backward")
    graph = None if call.chosen is None else _from_chosen(captured, call.chosen, entry, call.kinds)
    viewed = entry.viewed_gradients if backend in KERNEL_BACKENDS else {}
    return Executable(entry.trace, name, backend, frozenset({*entry.passed_gradients, *viewed}), report, graph)


def _from_chosen(captured: CapturedFunction, chosen: ResidualPlan, entry: BackwardEntry, kinds: Sequence[Any]) -> Graph:
    """backward on the residuals that were chosen. Raises CaptureError where we fail at that."""
    build = partial(chosen.backward_graph, kinds, entry, f"{captured.name}_backward")
    graph = or_fall_back(build, partial(captured.report, "backward"), "backward runs in eager")
    if graph is None:
        raise CaptureError(reason="internal error: it is not made to start from what forward kept", where="unknown")
    return graph


def _stand_in(fake: Tensor, sizes: Sizes) -> Tensor:
    shape, strides = rebind(fake.shape, sizes), rebind(tuple(fake.stride()), sizes)
    with FakeTensorMode():
        return torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device).requires_grad_(
            fake.requires_grad
        )


def _same_shape(tensor: Tensor, fake: Tensor, sizes: Sizes) -> bool:
    return tuple(tensor.shape) == tuple(rebind(fake.shape, sizes))
