"""The user's own jvp: run on a ctx of ours, or captured and run as kernels where it is declared traceable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ....ir.errors import FusegradError
from ....tracer.capture.capture import Session
from ....tracer.capture.context import BackwardContext
from ....tracer.containers import with_replaced
from ....tracer.function import rebind
from ....tracer.methods import as_tuple
from ....tracer.trace import CaptureError, Trace
from ...capture.guards import is_float
from ...capture.user_methods import ctx_attributes
from ...execution.aten.replay import step_by_step
from ...execution.executable import Executable
from ...execution.intermediates import intermediate_bytes
from ...settings.config import settings
from ...values.bitwise import bitwise_difference, cut_small
from ...values.sizes import Binder
from ..graphs import Body, GraphCache, present
from ..unit import TransformableGraph

if TYPE_CHECKING:
    from ...compiled.compiled import Compiled
    from ...specialize.specialization import Specialization

Tensor = torch.Tensor


class ComparedGraphs(GraphCache):
    """Graphs that stand for a method of the user's: a fresh capture is compared with the method itself."""

    def check(self, session: Session, trace: Trace, args: Sequence[Any]) -> None:
        live = present(args)
        values = _cut_to_fit(session, trace, [args[i] for i in live]) if settings().check else None
        if values is None:
            return

        def users(values: Sequence[Any]) -> Sequence[Any]:
            return self.body(*with_replaced(args, live, values))

        why = bitwise_difference(lambda given: step_by_step(trace.graph_module, *given, *trace.lifted), users, values)
        if why is not None:
            raise CaptureError(reason=why, where="unknown")


class NestedForwardMode(FusegradError):
    """A jvp of the user's under two levels of forward mode, of which torch would lose the outer one."""

    message = (
        "jvp({function}): within two levels of forward mode a `jvp` has to be traced, since torch drops the outer\n"
        "        tangent of what it computes, and it cannot be: {why}\n  at:   {where}\n"
        "  fix:  keep `jvp` to torch operations, or take one of the derivatives in reverse mode (grad, jacrev)."
    )


class CapturedUserJvp(TransformableGraph):
    """The user's jvp as a unit of (what is kept for it, sizes, the tangents that are there).

    For one that is declared traceable, and for any under two levels of forward mode.
    """

    def __init__(self, compiler: Compiled, body: Body, backend: str) -> None:
        self.compiler = compiler
        name, reads = f"{compiler.user.cls.__name__}_jvp", compiler.keys.reads_now()
        super().__init__(name, body, backend, reads, ComparedGraphs(name, body, backend, reads))

    def captured(self, args: Sequence[Any]) -> tuple[Executable, list[Tensor]]:
        """The graph for arguments like these. Raises NotTraceableError or NestedForwardMode where there can be none."""
        try:
            graph = super().captured(args)
        except CaptureError as error:
            if not self.compiler.ledger.must_capture("jvp"):
                facts = {"why": error.facts["reason"], "where": self.compiler.ledger.record_of("jvp", error).where}
                raise NestedForwardMode(function=self.compiler.user.cls.__name__, **facts) from error
            self.compiler.ledger.refuse("jvp", error)
            raise
        self.compiler.ledger.note_compiled("jvp")
        return graph


def run_user_jvp(
    cls: type, spec: Specialization, saved: Sequence[Any], sizes: Any, tangents: Sequence[Any]
) -> tuple[Any, ...]:
    """The jvp of the user's class on a ctx of ours.

    saved: what forward saved for it, and the tensors among ctx's attributes.
    """
    captured, forward = spec.captured, spec.captured.forward
    if forward.materialize_grads:
        tangents = tuple(_materialized(spec, i, t, sizes) for i, t in enumerate(tangents))
    n = len(forward.saved_for_forward)
    needs = forward.needs_input_grad[: captured.count]
    ctx = BackwardContext(saved[:n], ctx_attributes(captured, saved[n:], sizes), needs)
    return as_tuple(cls.jvp(ctx, *tangents))  # type: ignore[attr-defined]


def _materialized(spec: Specialization, argument: int, tangent: Any, sizes: Any) -> Any:
    """Zeros for an argument that does not move."""
    slots = spec.captured.slots
    if tangent is not None or argument not in slots:
        return tangent
    fake = spec.captured.forward.fakes[slots.index(argument)]
    shape = rebind(fake.shape, sizes)
    return torch.zeros(shape, dtype=fake.dtype, device=fake.device) if is_float(fake) else None


def _cut_to_fit(session: Session, trace: Trace, values: list[Any]) -> list[Any] | None:
    """The values, cut down where the body would fill memory; None where no cut is legal."""
    sizes = Binder(trace.fakes)(values)
    if intermediate_bytes(trace.graph_module, sizes) <= settings().check_bytes:
        return values
    if not all(isinstance(v, Tensor) for v in values):
        return None  # sizes are among them, and would have to be cut alike
    return cut_small(values, trace.fakes, sizes, session.conditions(sizes))
