"""One call of a compiled class: who is to run it, asked once, and what is made of its arguments, each once."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from ...ir.lazy_attribute import lazy_attribute
from ...tracer.capture.capture import OpaqueCallError, is_capturing
from ...tracer.containers import open_containers
from ...tracer.opaque.watching import watcher
from ...tracer.torch_private import dual_level, has_tangent, is_fake, transforms_active
from ..capture.graph_mode import is_for_outer_graph
from ..compiled.compiled import Compiled
from ..distributed.call import has_dtensors
from ..fallback.records import Attempt, Later, NotCaptured
from ..specialize.specialization import Specialization


class Mode(Enum):
    """The world that a call comes in, in the order of the questions: the first that holds decides."""

    INTERCEPTED = "inside a method that is being traced"
    EAGER = "of a class whose forward is declared not traceable, or failed too often"
    FOREIGN_GRAPH = "in a graph of torch.compile, torch.export or make_fx"
    OBSERVED = "under a mode that is to see the class's own operations, or with keywords that forward does not bind"
    DISTRIBUTED = "with DTensors"
    TRANSFORMED = "under torch.func, or with dual numbers"
    PLAIN = "on plain tensors; a level of forward mode may be open all the same, which is one for all threads"


class Outcome(Enum):
    """The answer of the class's table to a call on plain tensors."""

    COMPILED = "a specialization: a generated Function, whose backward is a graph"
    SPLIT = "a specialization with opaque nodes: compiled segments, eager lines between them"
    FIRST_SPLIT = "the first call that met an opaque node: recorded in eager, then traced around it"
    REFUSED = "a trace that failed: eager, and the reason goes on record"
    WAITS = "a kind of call that waits for its trace: eager until it has come often enough"
    EAGER = "a kind that is known to run in eager: with a backward that is traced by itself where it may be"


class Call:
    """The arguments of one call, by position where the class binds them, and the answers about it."""

    def __init__(self, compiled: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.compiled, self.args, self.kwargs = compiled, args, kwargs
        self.as_given = args if not kwargs else None
        """What a written-out entry of the inline cache is found by; None where keywords were given."""
        self.watching = watcher()
        """What follows the calls within the method that is being traced around this one."""
        self.mode = self._mode()

    def _mode(self) -> Mode:
        if self.watching is not None:
            return Mode.INTERCEPTED
        if _is_left_out(self.compiled):
            return Mode.EAGER
        self.bind()
        if self.kwargs or (is_capturing() and not _is_linearized(self.args)):
            return Mode.FOREIGN_GRAPH if is_for_outer_graph() and not self.kwargs else Mode.OBSERVED
        if has_dtensors(self.args):
            return Mode.DISTRIBUTED
        return Mode.TRANSFORMED if transforms_active() or self._pushes_tangents() else Mode.PLAIN

    def _pushes_tangents(self) -> bool:
        """True if an argument has a tangent, or a tracer is to find out; a level may be open for other calls.

        What a plain function closes over may have one, too; torch looks at the arguments of a class alone.
        """
        if dual_level() < 0:
            return False
        return is_capturing() or self.compiled.user.plain_function is not None or any(map(has_tangent, self.opened))

    def bind(self) -> None:
        """The arguments by position, defaults filled in, where forward is called without a ctx."""
        compiled = self.compiled
        if compiled.user.setup_style and (self.kwargs or len(self.args) != len(compiled.user.signature().parameters)):
            self.args, self.kwargs = compiled.user.bind(self.args, self.kwargs), {}

    @lazy_attribute
    def opened(self) -> Any:
        """The arguments, then the tensors inside the user's containers."""
        return open_containers(self.args)

    @lazy_attribute
    def known(self) -> Specialization | Attempt | str | None:
        """The specialization for the call, or why there is none: without the error, which holds frames of the call."""
        try:
            return self.compiled.specialization(self.opened, patient=self.compiled.is_patient())
        except Later as later:
            return str(later)
        except NotCaptured as error:
            return error.attempt

    @lazy_attribute
    def outcome(self) -> Outcome:
        """The answer of the class's table to it."""
        known = self.known
        if isinstance(known, str):
            return Outcome.WAITS
        if isinstance(known, Attempt):
            return Outcome.FIRST_SPLIT if isinstance(known.error, OpaqueCallError) else Outcome.REFUSED
        if known is not None and known.captured.opaque:
            return Outcome.SPLIT
        serves = known is not None and self.compiled.serves(known, self.opened)
        return Outcome.COMPILED if serves else Outcome.EAGER


def _is_left_out(compiled: Compiled) -> bool:
    """True if forward runs in eager wherever it is called, but in another compiler's graph, which refuses it."""
    declared = compiled.user.methods.declared["forward"].value is False or "forward" in compiled.ledger.broken
    return declared and not (is_capturing() and is_for_outer_graph())


def _is_linearized(args: Sequence[Any]) -> bool:
    """True if a tracer follows the tangents of real tensors (torch.func.linearize): the rules are needed for it."""
    return dual_level() >= 0 and not any(map(is_fake, args))
