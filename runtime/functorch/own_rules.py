"""A rule of the user's that he declared traceable: captured and run as kernels, or NotTraceableError; never Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...ir.errors import FusegradError
from ...tracer.capture.capture import Session
from ...tracer.containers import with_those
from ...tracer.trace import CaptureError, Trace
from ..execution.aten.replay import step_by_step
from ..execution.executable import Executable
from ..execution.intermediates import intermediate_bytes
from ..settings.config import settings
from ..values.bitwise import cut, differs
from ..values.sizes import Binder
from .unit import VALUES, Body, TransformableGraph

if TYPE_CHECKING:
    from ..compiled.compiled import Compiled

Tensor = torch.Tensor


class UsersUnit(TransformableGraph):
    """A unit that stands for a method of the user's: its first capture is compared with his own body."""

    def check(self, session: Session, trace: Trace, args: Sequence[Any], lifted: Sequence[Tensor]) -> None:
        """Raises CaptureError where the two differ."""
        live = [i for i, a in enumerate(args) if isinstance(a, VALUES)]
        values = _light(session, trace, [args[i] for i in live]) if settings().check else None
        if values is None:
            return

        def users(given: Sequence[Any]) -> Sequence[Any]:
            return self.body(*with_those(args, live, given))

        why = differs(lambda given: step_by_step(trace.graph_module, *given, *lifted), users, values)
        if why is not None:
            raise CaptureError(reason=why, where="unknown")


class NestedForwardMode(FusegradError):
    """A jvp of the user's under two levels of forward mode, of which torch would lose the outer one."""

    message = (
        "jvp({function}): within two levels of forward mode a `jvp` has to be traced, since torch drops the outer\n"
        "        tangent of what it computes, and it cannot be: {why}\n  at:   {where}\n"
        "  fix:  keep `jvp` to torch operations, or take one of the derivatives in reverse mode (grad, jacrev)."
    )


class PromisedJvp(UsersUnit):
    """The user's jvp as a unit of (what is kept for it, sizes, the tangents that are there).

    For one that he declared traceable, and for any under two levels of forward mode.
    """

    def __init__(self, compiler: Compiled, body: Body, backend: str) -> None:
        self.compiler = compiler
        super().__init__(f"{compiler.cls.__name__}_jvp", body, backend, compiler.reads_now())

    def captured(self, args: Sequence[Any]) -> tuple[Executable, list[Tensor]]:
        """The graph for arguments like these. Raises NotTraceableError or NestedForwardMode where there can be none."""
        try:
            found = super().captured(args)
        except CaptureError as error:
            if not self.compiler.must_capture("jvp"):
                facts = {"why": error.facts["reason"], "where": self.compiler.record_of("jvp", error).where}
                raise NestedForwardMode(function=self.compiler.cls.__name__, **facts) from error
            self.compiler.refuse("jvp", error)
            raise
        self.compiler.is_compiled("jvp")
        return found


def _light(session: Session, trace: Trace, values: list[Any]) -> list[Any] | None:
    """The values, cut down where the body would fill memory; None where no cut is legal."""
    sizes = Binder(trace.fakes)(values)
    if intermediate_bytes(trace.graph_module, sizes) <= settings().check_bytes:
        return values
    if not all(isinstance(v, Tensor) for v in values):
        return None  # sizes are among them, and would have to be cut alike
    return cut(values, trace.fakes, sizes, session.conditions(sizes))
