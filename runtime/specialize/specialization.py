"""A Function class at one key: what was captured of it, forward on the backends that ran it, and its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...ir import Graph
from ...tracer.capture.capture import capture_lock
from ...tracer.reads.reads import Reads
from ...tracer.trace import CaptureError, Trace
from ..capture.captured import CapturedFunction
from ..capture.captured_backward import predicted_kinds
from ..capture.opaque_replay import running_with_tape, take_offered_tape
from ..capture.outputs import finish_outputs
from ..execution.executable import Executable
from ..execution.pipeline import graph_of, optimize
from ..settings.config import KERNEL_BACKENDS
from ..settings.internal_errors import or_fall_back
from ..values.sizes import BoundSizes
from .compiled_backward import Backward
from .residuals import ResidualPlan, choose, executable_key, may_be_exchanged

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
        self._chosen: ResidualPlan | None = None
        self._decided = False
        self.proved: set[Any] = set()  # of what backward is derived from
        self.keeper: Any = None  # where it is kept on disk

    def executable(self, backend: str) -> Executable:
        """forward on `backend`, prepared once."""
        if backend not in self.executables:
            with capture_lock:
                self._add_executable(backend)
        return self.executables[backend]

    def _add_executable(self, backend: str) -> None:
        if backend in self.executables:  # another thread was first
            return
        captured = self.captured
        skip = captured.skip if backend in KERNEL_BACKENDS else frozenset()
        why_not = GIVEN_BACK if captured.returns_input_memory else ""
        self.executables[backend] = self._executable_of(captured.forward.trace, backend, skip, why_not=why_not)
        captured.guard = captured.current_guard()  # lowering may have learnt more about sizes

    def _executable_of(self, trace: Trace, backend: str, skip: frozenset[int], **options: Any) -> Executable:
        report = partial(self.captured.report, "forward")
        return Executable(trace, f"{self.captured.name}_forward", backend, skip, report, **options)

    def chosen(self, backend: str, sizes: Sizes) -> ResidualPlan | None:
        """Cheaper residuals than the user's, on a kernel backend; decided once, at the first sizes."""
        if backend not in KERNEL_BACKENDS:
            return None
        if not self._decided:
            with capture_lock:
                self._choose(sizes)
        return self._chosen

    def _choose(self, sizes: Sizes) -> None:
        if not self._decided:
            self.decide(chosen_residuals(self, sizes))
            self.captured.guard = self.captured.current_guard()  # what backward assumed is in both graphs

    def decide(self, chosen: ResidualPlan | None) -> None:
        """Keep these residuals, or the user's own."""
        self._chosen, self._decided = chosen, True

    def known_choice(self) -> ResidualPlan | None:
        """What was decided on residuals so far."""
        return self._chosen

    def chosen_executable(self, backend: str, chosen: ResidualPlan) -> Executable:
        """forward on `backend`, with the chosen values as its hidden outputs."""
        key = executable_key(backend, chosen)
        if key not in self.executables:
            with capture_lock:
                self._add_chosen(key, backend, chosen)
        return self.executables[key]

    def _add_chosen(self, key: str, backend: str, chosen: ResidualPlan) -> None:
        if key not in self.executables:
            captured, graph = self.captured, optimize(chosen.program.forward)
            self.executables[key] = self._executable_of(captured.forward.trace, backend, captured.skip, graph=graph)

    def run_forward(
        self, args: Sequence[Any], backend: str, chosen: ResidualPlan | None = None, sizes: Sizes | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(the user's tensor outputs, the hidden ones) on real tensors."""
        captured = self.captured
        inputs = captured.tensors_of(args)
        sizes = captured.sizes(args) if sizes is None else sizes
        executable = self.executable(backend) if chosen is None else self.chosen_executable(backend, chosen)
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


def chosen_residuals(spec: Specialization, sizes: Mapping[Any, int]) -> ResidualPlan | None:
    """Cheaper residuals for the commonest backward, which is captured for that; None where the user's own are kept."""
    captured = spec.captured
    if not may_be_exchanged(captured):
        return None
    try:
        capture = partial(spec.backward.entry, predicted_kinds(captured))
        backward = or_fall_back(capture, partial(captured.report, "backward"), "saved as written")
    except CaptureError:
        return None
    return None if backward is None else choose(captured, backward, sizes)


def forward_graph(spec: Specialization, chosen: ResidualPlan | None) -> Graph:
    """forward lowered, with the residuals that were chosen, or the user's own."""
    if chosen is not None:
        return optimize(chosen.program.forward)
    return graph_of(spec.captured.forward.trace, f"{spec.captured.name}_forward")
