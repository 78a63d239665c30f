"""A rule of the user's that he declared traceable: captured and run as kernels, or NotTraceableError; never his Python.

A first capture is compared with the user's own body, here and wherever else a unit stands for one of his methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..tracer.capture import CaptureError, Session, Trace
from .check import cut, differs, intermediate_bytes
from .config import settings
from .plan import Binder, Executable
from .unit import VALUES, Body, Unit

if TYPE_CHECKING:
    from .function import Compiler

Tensor = torch.Tensor


class PromisedJvp(Unit):
    """The user's jvp as a unit of (what is kept for it, sizes, the tangents that are there)."""

    def __init__(self, compiler: Compiler, body: Body, backend: str) -> None:
        self.compiler = compiler
        super().__init__(f"{compiler.cls.__name__}_jvp", body, backend, compiler.reads_now())

    def captured(self, args: Sequence[Any]) -> tuple[Executable, list[Tensor]]:
        """The graph for arguments like these. Raises NotTraceableError where there can be none."""
        try:
            found = super().captured(args)
        except CaptureError as error:
            self.compiler.refuse("jvp", error)
            raise
        self.compiler.is_compiled("jvp")
        return found

    def check(self, session: Session, trace: Trace, args: Sequence[Any], lifted: Sequence[Tensor]) -> None:
        compare(self.body, session, trace, args, lifted)


def compare(body: Body, session: Session, trace: Trace, args: Sequence[Any], lifted: Sequence[Tensor]) -> None:
    """The first comparison of a captured body with itself, run by Python; raises CaptureError where they differ."""
    live = [i for i, a in enumerate(args) if isinstance(a, VALUES)]
    values = _light(session, trace, [args[i] for i in live]) if settings().check else None
    if values is None:
        return

    def users(given: Sequence[Any]) -> Sequence[Any]:
        full = list(args)
        for i, value in zip(live, given, strict=True):
            full[i] = value
        return body(*full)

    why = differs(lambda given: trace.graph_module(*given, *lifted), users, values)
    if why is not None:
        raise CaptureError(reason=why, where="unknown")


def _light(session: Session, trace: Trace, values: list[Any]) -> list[Any] | None:
    """The values, cut down where the body would fill memory; None where no cut is legal."""
    sizes = Binder(trace.fakes)(values)
    if intermediate_bytes(trace.graph_module, sizes) <= settings().check_bytes:
        return values
    if not all(isinstance(v, Tensor) for v in values):
        return None  # sizes are among them, and would have to be cut alike
    return cut(values, trace.fakes, sizes, session.conditions(sizes))
