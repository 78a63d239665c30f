"""A Function class at one key: what was captured of it, forward on the backends that ran it, and its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...ir import Graph
from ...ir.switches import use_switch_state
from ...tracer.capture.capture import capture_lock
from ...tracer.reads.reads import Reads
from ...tracer.trace import CaptureError
from ..capture.captured import CapturedFunction
from ..capture.captured_backward import BackwardEntry, predicted_kinds
from ..capture.opaque_replay import running_with_tape, take_offered_tape
from ..capture.outputs import finish_outputs
from ..execution.executable import Executable
from ..execution.graph_to_kernels import graph_of, optimize
from ..settings.config import KERNEL_BACKENDS
from ..settings.internal_errors import or_fall_back
from ..values.sizes import BoundSizes
from .compiled_backward import Backward
from .residuals import ResidualPlan, executable_key, may_be_exchanged

Tensor = torch.Tensor
Sizes = BoundSizes
GIVEN_BACK = "an operator returns memory that it is given, of which it says nothing"


class Specialization:
    """A captured function, and what runs it."""

    def __init__(self, captured: CapturedFunction, of_whole: bool = False) -> None:
        """of_whole: captured at the sizes of whole DTensors, to run at those of their parts as well."""
        self.captured, self.backward = captured, Backward(captured, of_whole)
        self.of_whole = of_whole
        self.executables: dict[str, Executable] = {}
        self.nodes: dict[Any, Any] = {}  # the generated Functions and units over this specialisation
        self.residual_plan: ResidualPlan | None = None
        self.is_decided = False
        self.proved: set[Any] = set()  # of what backward is derived from
        self.keeper: Any = None  # where it is kept on disk
        self.why_as_traced: str | None = None  # what kernels made apart would compare; None until that is asked
        self.told_as_traced = False

    def executable(self, backend: str, residual_plan: ResidualPlan | None = None) -> Executable:
        """forward on `backend`, lowered once: with the user's residuals as its hidden outputs, or with the plan's."""
        key = executable_key(backend, residual_plan)
        if key not in self.executables:
            with capture_lock:
                if key not in self.executables:  # no other thread was first
                    with use_switch_state(self.captured.switches):
                        self.executables[key] = self._executable(backend, residual_plan)
        return self.executables[key]

    def _executable(self, backend: str, residual_plan: ResidualPlan | None) -> Executable:
        captured = self.captured
        graph = None if residual_plan is None else optimize(residual_plan.program.forward)
        skip = captured.skip if backend in KERNEL_BACKENDS else frozenset()
        why_not = GIVEN_BACK if captured.returns_input_memory else ""
        executable = Executable(
            captured.forward.trace, f"{captured.name}_forward", backend, skip,
            partial(captured.report, "forward"), graph=graph, why_not=why_not,
        )  # fmt: skip
        captured.guard = captured.current_guard()  # lowering may have learnt more about sizes
        return executable

    def decide(self, residual_plan: ResidualPlan | None) -> None:
        """Keep these residuals, or the user's own."""
        self.residual_plan, self.is_decided = residual_plan, True

    def run_forward(
        self, args: Sequence[Any], backend: str, residual_plan: ResidualPlan | None = None, sizes: Sizes | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(the user's tensor outputs, the hidden ones) on real tensors."""
        captured = self.captured
        inputs = captured.tensors_of(args)
        sizes = captured.sizes(args) if sizes is None else sizes
        executable = self.executable(backend, residual_plan)
        lifted = [r.get() for r in captured.lifted if r is not None]
        given = inputs
        if captured.unversioned_inputs:  # written to by way of `.data`: their versions stay
            given = [t.data if i in captured.unversioned_inputs else t for i, t in enumerate(inputs)]
        if captured.opaque:  # what they return may be of further sizes; their own code runs under the call's autocast
            with running_with_tape(executable, take_offered_tape(), sizes) as extended, captured.without_added_casts():
                results = executable(given, lifted, extended)
            sizes.learn(extended)
        else:
            with captured.without_added_casts():
                results = executable(given, lifted, sizes)
        return finish_outputs(captured, results, inputs, sizes)

    def adopt(self, cls: type, reads: Reads) -> None:
        """Another backward in the place of the one that could not be captured; what it reads, and does besides."""
        captured = self.captured
        captured.cls, captured.reads, self.backward.failed = cls, reads.with_arguments(captured.arguments), False
        self.backward.entries.clear()
        for unit in self.nodes.values():
            if hasattr(unit, "reads"):
                unit.reads = captured.reads


def predicted_backward(spec: Specialization, sizes: Mapping[Any, int]) -> BackwardEntry | None:
    """The commonest backward, captured; None where it cannot be, or where nothing may be exchanged for it."""
    captured = spec.captured
    if not may_be_exchanged(captured, sizes):
        return None
    try:
        capture = partial(spec.backward.entry, predicted_kinds(captured))
        return or_fall_back(capture, partial(captured.report, "backward"), "saved as written")
    except CaptureError:
        return None


def forward_graph(spec: Specialization, residual_plan: ResidualPlan | None) -> Graph:
    """forward lowered, with the residuals of a plan, or the user's own."""
    if residual_plan is not None:
        return optimize(residual_plan.program.forward)
    return graph_of(spec.captured.forward.trace, f"{spec.captured.name}_forward")
