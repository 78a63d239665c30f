"""The captured graphs of one body: one per kind of arguments and range of sizes, each in ATen and in the IR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...ir.switches import is_on
from ...tracer.capture.capture import Session, capture_lock
from ...tracer.containers import with_replaced
from ...tracer.function import guarded_trace
from ...tracer.loops.lengths import FEWEST
from ...tracer.reads.reads import Read, Reads
from ...tracer.trace import Trace
from ..capture.captured import require_capture_allowed
from ..capture.guards import Guard, argument_fact, global_state, size_guard
from ..capture.redraw import draws
from ..execution.executable import Executable
from ..settings import logs
from ..settings.config import KERNEL_BACKENDS
from ..settings.counters import count
from .batching.ir_rules import Lowered, lowered

Tensor = torch.Tensor
Body = Callable[..., Sequence[Any]]
VALUES = (Tensor, int, torch.SymInt)
"""What is an input of a graph; everything else, and None, is not."""


def present(args: Sequence[Any]) -> list[int]:
    """The numbers of the arguments that are inputs of a graph."""
    return [i for i, a in enumerate(args) if isinstance(a, VALUES)]


@dataclass
class CachedGraph:
    """A graph, what has to be equal of arguments for it to serve them, and what it reads besides them."""

    facts: tuple[Any, ...]
    guard: Guard
    executable: Executable
    lifted: list[Read]
    session: Session


class GraphCache:
    """Looks up the graph for given arguments, and captures it if need be.

    Subclasses say where a trace comes from (`trace`), and what a fresh one has to pass (`check`).
    """

    def __init__(self, name: str, body: Body, backend: str, reads: Reads, from_source: bool = True) -> None:
        """from_source: the body is the user's Python, whose lines name the operations."""
        self.name, self.body, self.backend, self.reads, self.from_source = name, body, backend, reads, from_source
        self.entries: list[CachedGraph] = []
        self.in_ir: dict[int, Lowered | None] = {}  # by the executable

    def __len__(self) -> int:
        return len(self.entries)

    def lookup(self, args: Sequence[Any], further: tuple[Any, ...] = ()) -> tuple[Executable, list[Tensor]]:
        """The graph for arguments like these, and the tensors that it reads from outside. Raises CaptureError.

        further: what else has to be equal for it to serve.
        """
        kinds = (argument_fact(a) if not isinstance(a, int) else "int" for a in args)
        facts = (*kinds, *global_state(), *self.reads.facts(), *further)
        values = [args[i] for i in present(args)]
        with capture_lock:
            for entry in self.entries:
                if entry.facts == facts and entry.guard(values):
                    return entry.executable, [read.get() for read in entry.lifted]
            return self._capture(args, facts)

    def _capture(self, args: Sequence[Any], facts: tuple[Any, ...]) -> tuple[Executable, list[Tensor]]:
        session, trace = self.trace(args)
        self.check(session, trace, args)
        lifted = [read for t in trace.lifted if (read := self.reads.tensor_path(t)) is not None]
        executable = Executable(trace, self.name, self.backend)
        guard = size_guard(session, trace.fakes)  # on integers too: sizes that no tensor here shows
        self.entries.append(CachedGraph(facts, guard, executable, lifted, session))
        return executable, trace.lifted

    def trace(self, args: Sequence[Any], dynamic: bool = True) -> tuple[Session, Trace]:
        """The body at arguments like these, for these sizes alone where `dynamic` is False. Raises CaptureError."""
        require_capture_allowed(self.name)
        count("captures")
        rolls = FEWEST if self.from_source and self.backend in KERNEL_BACKENDS and is_on("loops") else 0
        session, live = Session(dynamic, rolls), present(args)
        fakes = [session.fake(a) if isinstance(a := args[i], Tensor) else session.integer(a) for i in live]

        def run(*values: Any) -> tuple[Any, ...]:
            return tuple(self.body(*with_replaced(args, live, values)))

        with logs.capturing(self.name, lambda: trace):
            trace = guarded_trace(session, run, fakes, self.reads, self.from_source)
        return session, trace

    def check(self, session: Session, trace: Trace, args: Sequence[Any]) -> None:
        """Raises CaptureError where a fresh capture is not what was to be captured."""

    def lower(self, executable: Executable) -> None:
        """Bring a graph into the IR, and let its guard hold what that learns about sizes."""
        with capture_lock:
            if id(executable) in self.in_ir:  # another thread was first
                return
            entry = next(e for e in self.entries if e.executable is executable)
            self.in_ir[id(executable)] = lowered(executable, self.name)
            entry.guard = size_guard(entry.session, executable.trace.fakes)

    @property
    def may_loop(self) -> bool:
        """True if a graph that was captured has the node of a loop."""
        return any(e.executable.trace.has_loop for e in self.entries)

    @property
    def draws(self) -> bool:
        """True if a run draws random numbers, as far as is known before: it may, where nothing is captured yet."""
        return not self.entries or any(draws(e.executable.trace) for e in self.entries)
