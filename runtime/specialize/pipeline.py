"""The whole compiler, from a class and its arguments to what runs: one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...codegen import Target
from ...ir.switches import is_on
from ...tracer.capture.capture import capture_lock
from ...tracer.loops.lengths import FEW, FEWEST
from ...tracer.loops.reasons import LATE_STEPS
from ...tracer.opaque.opaque import Tape
from ...tracer.reads.reads import Reads
from ...tracer.trace import CaptureError
from ..capture.captured import Report, capture_function
from ..capture.first_call_check import check_forward
from ..execution.executable import device_of
from ..execution.targets import target_for
from ..settings.config import KERNEL_BACKENDS, ROLLED_BACKENDS
from ..values.sizes import BoundSizes
from .comparisons import backend_apart, compared_plan, for_a_call
from .randomness import require_none as require_no_draws
from .residuals import ResidualPlan, choose
from .specialization import Specialization, predicted_backward


def specialize(
    cls: type,
    args: Sequence[Any],
    reads: Reads,
    dynamic: bool = True,
    backend: str | None = None,
    report: Report | None = None,
    tape: Tape | None = None,
    of_whole: bool = False,
    rolls: int | None = None,
) -> Specialization:
    """One class at one key, ready to be run on `backend`. Raises CaptureError.

    backend: None for a report or an export, which run nothing: no first-call check, nothing lowered yet.
    tape: what the opaque calls of forward returned, which are in the graph as they are.
    of_whole: captured at the sizes of whole DTensors, to run at those of their parts as well.
    rolls: a loop over a size is one node where it can be, from so many steps on (0: none is); None: by the backend.
    """
    # The user's methods on fake tensors: an ATen graph, guards on sizes, where everything comes from that ctx keeps.
    own_tape = None if tape is None else tape.rewound_tape()
    fewest = min(n for n in (fewest_steps(backend), rolls) if n is not None)
    captured = capture_function(cls, args, reads, dynamic, report, own_tape, fewest)
    if rolls == 0:
        captured.session.unrolled.append(LATE_STEPS)
    spec = Specialization(captured, of_whole)
    if backend is None:
        return spec
    # What a derived backward could not draw again is refused before anything runs.
    require_no_draws(spec)
    # What fakes hide is found, not trusted: bit for bit the user's own method, on the call's data.
    try:
        require_equal(spec, args, tape)
    except CaptureError:
        if not captured.forward.trace.rolled:
            raise
        # what the method does at this length was not to be seen at small ones
        return specialize(cls, args, reads, dynamic, backend, report, tape, of_whole, rolls=0)
    # ATen to primitives, simplified: what lowering learns about sizes belongs to the guard of the call.
    if not captured.writes_shared_memory(args):  # such a call is not served
        spec.executable(backend)
    return spec


def fewest_steps(backend: str | None) -> int:
    """From so many steps on a loop over a size is one node; 0: it never is."""
    if not is_on("loops"):
        return 0
    if backend is None or backend in KERNEL_BACKENDS:
        return FEWEST
    return FEW if backend in ROLLED_BACKENDS else 0


def prepare(
    spec: Specialization, backend: str, sizes: BoundSizes, keeps_own_residuals: bool = False
) -> tuple[str, ResidualPlan | None]:
    """The steps that depend on sizes and device, before the first run on `backend`: kernels, and what backward gets.

    Returns the backend that serves, which is another one where kernels would not do, and the residuals.

    keeps_own_residuals: those of the user, where something looks at them, or their own backward runs.
    """
    residual_plan = None
    if backend in KERNEL_BACKENDS and not keeps_own_residuals:
        # The commonest backward is captured first: what forward hands over is chosen for both together, once.
        with capture_lock:
            if not spec.is_decided:
                spec.decide(for_a_call(spec, choose_residuals(spec, sizes, partial(target_of, spec, backend))))
                spec.captured.guard = spec.captured.current_guard()  # what backward assumed is in both graphs
        residual_plan = spec.residual_plan
    # Without, forward and backward are compiled apart: what backward compares with forward's results has to be theirs.
    if residual_plan is None and any(spec.captured.forward.needs_input_grad):
        backend = backend_apart(spec, backend)
    # Groups are fused, kernels generated and proved; where opaque nodes come between, their results tell the sizes.
    executable = spec.executable(backend, residual_plan)
    if not spec.captured.opaque:
        executable.prepare(sizes)
    return backend, residual_plan


def target_of(spec: Specialization, backend: str) -> Target:
    """The target of a specialization's kernels on a backend."""
    return target_for(backend, device_of(spec.captured.forward.trace))


def choose_residuals(
    spec: Specialization, sizes: Mapping[Any, int], target: Callable[[], Target]
) -> ResidualPlan | None:
    """Other residuals for the commonest backward, cheaper or the same bits; None where the user's own are kept."""
    backward = predicted_backward(spec, sizes)
    if backward is None:
        return None
    return compared_plan(spec.captured, backward) or choose(spec.captured, backward, sizes, target)


def require_equal(spec: Specialization, args: Sequence[Any], tape: Tape | None = None) -> None:
    """The first call's comparison with the user's own forward. Raises CaptureError where they differ."""
    if (why := check_forward(spec.captured, args, tape)) is not None:
        raise CaptureError(reason=why, where=spec.captured.forward_place())
