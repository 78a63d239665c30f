"""Functions whose backward compares what it makes again with what forward selected: the same bits in both.

    forward: far = d.amax(1)        backward: where(d == far, ..)

Kernels of two graphs add in two orders. In a plain call forward hands over what is compared, so that nothing is made
again. Where both are compiled apart (transforms, hooks on saved tensors, graphs of torch.compile), and where backward
is differentiated, the operations of both run as they were traced, with eager's bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.autograd import Function

from ...ir.errors import LoweringError
from ...ir.passes.programs.compared import Compared, Pair, hands_over_selected, pairs_alone, pairs_of
from ...ir.passes.programs.recompute import present
from ...ir.program import Program, ValueRef
from ...ir.switches import use_switch_state, watch_allows
from ...ir.text.source_names import source_name
from ...tracer.capture.capture import capture_lock
from ...tracer.methods import backward_method
from ...tracer.torch_private import plain_tensors
from ...tracer.trace import CaptureError, Trace
from ..capture.captured import CapturedFunction
from ..capture.captured_backward import BackwardEntry, predicted_kinds
from ..execution.executable import Executable, may_differ_from_eager
from ..execution.graph_to_kernels import graph_of
from ..settings.config import AS_TRACED
from .residuals import ResidualPlan, forward_program, may_compare, program_of

if TYPE_CHECKING:
    from .specialization import Specialization

AS_EAGER = "its operations run as they were traced, with eager's bits: "
UNSEEN = AS_EAGER + "backward falls back to eager, and may compare what it makes again with what forward selected"
UNSEEN_JVP = AS_EAGER + "jvp is the class's own, and may compare what it makes again with what forward selected"


# ------------------------------------------------------------------ compiled apart
def backend_apart(spec: Specialization, backend: str, own_jvp: bool = False) -> str:
    """The backend of a forward and a backward that are compiled apart: AS_TRACED, on record, where they compare.

    own_jvp: the user's own jvp follows.
    """
    if backend == AS_TRACED or _has_eagers_bits(spec, backend):
        return backend
    why = why_as_traced(spec, backend) or (UNSEEN_JVP if own_jvp and may_compare(spec.captured) else "")
    if not why:
        return backend
    if not spec.told_as_traced:
        spec.told_as_traced = True
        spec.captured.report("forward", why)
    return AS_TRACED


def why_as_traced(spec: Specialization, backend: str) -> str:
    """The reason why kernels that are made apart would compare other bits than eager; "" where none would."""
    if _has_eagers_bits(spec, backend):
        return ""
    if spec.why_as_traced is None:
        with capture_lock, use_switch_state(spec.captured.switches), plain_tensors(), torch.no_grad():
            spec.why_as_traced = _reason(spec)
    return spec.why_as_traced


def _has_eagers_bits(spec: Specialization, backend: str) -> bool:
    return backend == "reference" and not may_differ_from_eager(spec.captured.forward.trace)


def _reason(spec: Specialization) -> str:
    captured = spec.captured
    if captured.is_plain or backward_method(captured.cls) is None:
        return ""
    forward = _lowered_forward(captured)
    if forward is not None and not hands_over_selected(forward):
        return ""
    try:
        entry = spec.backward.entry(predicted_kinds(captured))
        pairs = _pairs_alone(captured, entry) if forward is None else pairs_of(program_of(captured, entry))
    except (CaptureError, LoweringError):  # it runs one operation after the other
        return UNSEEN if forward is not None and any(captured.forward.needs_input_grad) else ""
    return AS_EAGER + _told(pairs[0]) if pairs else ""


def _lowered_forward(captured: CapturedFunction) -> Program | None:
    """forward as kernels would run it; None where its operations run as they were traced in any case."""
    with suppress(LoweringError):
        return None if captured.returns_input_memory else forward_program(captured)
    return None


def _pairs_alone(captured: CapturedFunction, entry: BackwardEntry) -> list[Pair]:
    kept = sum(p is not None for p in captured.residual_places)
    return pairs_alone(graph_of(entry.trace, f"{captured.name}_backward"), kept)


def why_alone_as_traced(trace: Trace, name: str, given: int) -> str:
    """The same of a backward whose forward runs as written. given: how many inputs are no gradients."""
    with suppress(LoweringError):
        pairs = pairs_alone(graph_of(trace, name), given)
        return AS_EAGER + _told(pairs[0]) if pairs else ""
    return ""


def _told(pair: Pair) -> str:
    made, handed = source_name(pair.made), source_name(pair.handed)
    return f"backward makes `{made}` again and compares it with `{handed}`, which forward hands over"


# ------------------------------------------------------------------ compiled together
def compared_plan(captured: CapturedFunction, backward: BackwardEntry) -> ComparedPlan | None:
    """What backward compares besides the user's residuals; None where there is nothing, or it may not be kept."""
    try:
        program = program_of(captured, backward)
    except (CaptureError, LoweringError):
        return None
    new = program if captured.is_plain or program.forward.mutations else Compared()(program)
    if new is program or not watch_allows("recompute", captured.name):
        return None
    plan = ComparedPlan.of(program, new)
    plan.take(captured, pairs_of(program)[0])
    return plan


def for_a_call(spec: Specialization, plan: ResidualPlan | None) -> ResidualPlan | None:
    """The plan where calls may have it: those whose backward may be differentiated, or run as written."""
    if isinstance(plan, ComparedPlan):
        return plan if plan.can_be_remade() else None
    return None if plan is not None and why_as_traced(spec, "") else plan


class ComparedPlan(ResidualPlan):
    """The user's residuals, and what backward would make again to compare with them.

    Those of the user are from kernels; where backward runs as written, or is differentiated, they are made again by
    the operations of forward, as what they are compared with is.
    """

    def take(self, captured: CapturedFunction, pair: Pair) -> None:
        """The Function that it is a plan of, and what its backward compares."""
        self.of_function, self.pair = captured, pair

    @property
    def line(self) -> str:
        """A line for `explain`."""
        made, handed = source_name(self.pair.made), source_name(self.pair.handed)
        apart = "under transforms, hooks, checkpoints and torch.compile operations run as they were traced"
        return f"compared {made}: with {handed}, bit for bit, and handed over; {apart}"

    def can_be_remade(self) -> bool:
        """True where all that forward was given is among the residuals."""
        captured = self.of_function
        given = {p.index for p in present(self.captured) if p.kind == "input"}
        if captured.draws or captured.opaque or captured.lifted or captured.unversioned_inputs:
            return False
        return given >= set(range(len(captured.slots)))

    def originals(self, residuals: Sequence[Any], ctx: Any) -> list[Any]:
        """The user's residuals as forward's operations make them: results of it with the history that they have."""
        values = self._by_place(residuals)
        with torch.no_grad():
            remade = self.rebuilt(residuals, ctx._fusegrad_sizes)
        pairs = zip(self.residuals, remade, strict=True)
        return [again if p is None or p.kind == "hidden" else _same_history(values[p], again) for p, again in pairs]

    def rebuilt(self, residuals: Sequence[Any], sizes: dict[sympy.Symbol, int]) -> list[Any]:
        """The residuals that the user saved, with eager's bits."""
        captured, values = self.of_function, self._by_place(residuals)
        inputs = [values[p] for p in sorted(p for p in values if p.kind == "input")]
        executable = Executable(captured.forward.trace, f"{captured.name}_forward", AS_TRACED)
        with captured.without_added_casts():
            results = executable(inputs, [], sizes)
        remade = {"output": results, "hidden": results[self.captured.user_outputs :]}
        return [p and (remade[p.kind][p.index] if p.kind in remade else values[p]) for p in self.residuals]

    def _by_place(self, residuals: Sequence[Any]) -> dict[ValueRef, Any]:
        return {p: r for p, r in zip(self.places, residuals, strict=True) if p is not None}


def _same_history(result: Any, again: Any) -> Any:
    """The same in other bits, which depends on what the result depends on."""
    if again is result or not result.is_floating_point():
        return result
    return _InTheHistoryOf.apply(result, again)  # type: ignore[no-untyped-call]


class _InTheHistoryOf(Function):
    """(result, the same in other bits) -> the other bits, which depend on what the result depends on."""

    @staticmethod
    def forward(result: Any, again: Any) -> Any:
        return again.view_as(again)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: both rules are the identity."""

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, _: Any) -> Any:
        return tangent.view_as(tangent)
