"""Records of a class's methods: compiled or not and why; warnings; the exceptions of a capture that failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...ir.codes import code_of
from ...tracer.frames import warn_user
from ...tracer.opaque.opaque import OpaqueNode, reason_alone
from ...tracer.trace import CaptureError
from ..settings.config import warns


@dataclass(frozen=True)
class OpaqueCall:
    """A call, or lines of a method, that is not traceable and runs in eager: in which method, where, and why."""

    node: str
    """The function that is called, or the lines of the method that run in eager."""
    method: str
    """The method that calls it."""
    where: str
    """`file:line` of the call."""
    reason: str
    """Why it is not traceable."""

    @classmethod
    def of(cls, node: OpaqueNode, method: str) -> OpaqueCall:
        """The report of a node of a graph."""
        return cls(node.name, method, node.where, node.why.reason)

    @property
    def reason_of_method(self) -> str:
        """The reason, as a sentence about the method."""
        return reason_alone(self.reason) if self.is_segment else f"it calls `{self.node}`, which {self.reason}"

    @property
    def code(self) -> str:
        """The code of the reason why lines of the method fall back to eager; "" for a nested call."""
        return f" [{code_of(self.reason_of_method)}]" if self.is_segment else ""

    @property
    def is_segment(self) -> bool:
        """True if the node is lines of the method itself."""
        return self.node.startswith("line") and self.where.rpartition(":")[2] in self.node.split("_")

    def __str__(self) -> str:
        if self.is_segment:
            return f"{self.method} is split: {self.reason_of_method} ({self.where})"
        return f"{self.method} calls `{self.node}`, which {self.reason}, between its segments ({self.where})"


@dataclass(frozen=True)
class Record:
    """The state of a method: compiled or not, why, and where."""

    status: str
    """What runs for it.

    - "compiled"; "not yet traced": no call has come so far.
    - "opaque": it falls back to eager.
    - "derived": fusegrad makes it from other methods.
    - "absent": there is none, and none can be derived.
    """
    reason: str | None = None
    """Why it falls back to eager or is absent, or what is particular about it; None where there is nothing to say."""
    where: str | None = None
    """`file:line` of the reason."""

    @property
    def code(self) -> str | None:
        """The code of the reason, FG010 say: a row of `ir/codes.py`; None where there is no reason."""
        return code_of(self.reason)


class FallbackWarning(UserWarning):
    """A method falls back to eager; the message says which, why, and at which line."""


@dataclass(frozen=True)
class Attempt:
    """A capture of forward that failed: the user's own method is to run, and the reason to be put on record."""

    error: CaptureError
    key: Any
    facts: Any


class NotCaptured(Exception):
    """forward could not be captured for a call. The attempt is what may be kept of it: this has frames of the call."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(str(attempt.error))
        self.attempt = attempt


class Later(Exception):
    """A call is not worth a capture yet, and why: the user's own class runs, all of it."""


def warn(message: str) -> None:
    """A FallbackWarning at the user's line, where settings want warnings."""
    if warns():
        warn_user(message, FallbackWarning)


def needs_a_fix(record: Record) -> bool:
    """True if a method is not compiled as its author may have hoped for."""
    return record.reason is not None and record.status != "derived"
