"""Functions whose backward compares what it makes again with what forward selected: the same bits in both.

    forward: far = d.amax(1)        backward: where(d == far, ..)

Kernels of two graphs add in two orders. In a plain call forward hands over what is compared, so that nothing is made
again. Where both are compiled apart (transforms, hooks on saved tensors, graphs of torch.compile), and where backward is
differentiated, the operations of both run as they were traced, with eager's bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import sympy
import torch

from ...ir.errors import LoweringError
from ...ir.passes.programs.compared import Compared, Pair, added_in, pairs_of
from ...ir.passes.programs.recompute import present, value_at
from ...ir.switches import use_switch_state, watch_allows
from ...ir.text.source_names import source_name
from ...tracer.capture.capture import capture_lock
from ...tracer.methods import backward_method
from ...tracer.torch_private import plain_tensors
from ...tracer.trace import CaptureError
from ..capture.captured import CapturedFunction
from ..capture.captured_backward import BackwardEntry, predicted_kinds
from ..execution.executable import Executable, may_differ_from_eager
from ..settings.config import AS_TRACED
from .residuals import ResidualPlan, may_compare, program_of

if TYPE_CHECKING:
    from .specialization import Specialization

AS_EAGER = "its operations run as they were traced, with eager's bits: "
UNSEEN = AS_EAGER + "backward falls back to eager, and may compare what it makes again with what forward selected"


# ------------------------------------------------------------------ compiled apart
def backend_apart(spec: Specialization, backend: str) -> str:
    """The backend of a forward and a backward that are compiled apart: AS_TRACED, on record, where they compare."""
    if backend == AS_TRACED or not (why := why_as_traced(spec, backend)):
        return backend
    if not spec.told_as_traced:
        spec.told_as_traced = True
        spec.captured.report("forward", why)
    return AS_TRACED


def why_as_traced(spec: Specialization, backend: str) -> str:
    """The reason why kernels that are made apart would compare other bits than eager; "" where none would."""
    if backend == "reference" and not may_differ_from_eager(spec.captured.forward.trace):
        return ""
    if spec.why_as_traced is None:
        with capture_lock, use_switch_state(spec.captured.switches), plain_tensors(), torch.no_grad():
            spec.why_as_traced = _reason(spec)
    return spec.why_as_traced


def _reason(spec: Specialization) -> str:
    captured = spec.captured
    if captured.is_plain or backward_method(captured.cls) is None or not may_compare(captured):
        return ""
    try:
        pairs = pairs_of(program_of(captured, spec.backward.entry(predicted_kinds(captured))))
    except LoweringError:
        return ""
    except CaptureError:
        return UNSEEN if any(captured.forward.needs_input_grad) else ""
    return AS_EAGER + _told(pairs[0]) if pairs else ""


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
        """True where all that forward was given is among the residuals, and no result of it is compared."""
        captured, forward = self.of_function, self.captured.forward
        given = {p.index for p in present(self.captured) if p.kind == "input"}
        added = added_in(forward)
        results = [value_at(self.captured, p) for p in present(self.captured) if p.kind == "output"]
        if captured.draws or captured.opaque or captured.lifted or captured.unversioned_inputs:
            return False
        complete = given >= set(range(len(captured.slots)))
        return complete and not any(v is not None and v.id in added for v in results)

    def rebuilt(self, residuals: Sequence[Any], sizes: dict[sympy.Symbol, int]) -> list[Any]:
        """The residuals that the user saved, with eager's bits."""
        captured, program = self.of_function, self.captured
        kept = [p for p in self.places if p is not None]
        values = dict(zip(kept, (r for r, p in zip(residuals, self.places, strict=True) if p is not None), strict=True))
        inputs = [values[p] for p in sorted(p for p in values if p.kind == "input")]
        executable = Executable(captured.forward.trace, f"{captured.name}_forward", AS_TRACED)
        with captured.without_added_casts():
            results = executable(inputs, [], sizes)
        remade = results[program.user_outputs :]
        return [None if p is None else remade[p.index] if p.kind == "hidden" else values[p] for p in self.residuals]
