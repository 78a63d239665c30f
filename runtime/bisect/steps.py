"""The steps from a class to what runs: counted, cut off after so many; and what ran, to be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..values.bitwise import _copy

WORDS = {
    "capture": "the trace",
    "lower": "lowering to the IR",
    "simplify": "simplify",
    "rule": "a rule of simplify",
    "contract": "contract",
    "simplify again": "simplify, after contract",
    "recompute": "recompute (what is kept for backward)",
    "overlap": "overlap (what a derived backward takes over)",
    "divide": "the division into groups",
    "products": "products in kernels",
    "place": "products written in place",
    "kernels": "the kernels of a group",
    "binding": "binding (operations past torch's boxing)",
    "reuse": "reuse of memory",
    "ready": "the call, written out",
}
"""The name of each kind of step in reports."""


@dataclass(frozen=True)
class Step:
    """One step: of a kind, on a graph, a group or a method. `detail`: what it was about to do, if that is known."""

    kind: str
    subject: str
    detail: Any = None

    def __str__(self) -> str:
        return f"{WORDS.get(self.kind, self.kind)}, {self.subject}"


@dataclass(frozen=True)
class Execution:
    """Something that ran, or was made, with what it was given."""

    subject: Any
    inputs: Sequence[Any]
    sizes: Any


class Steps:
    """Lets the first `most` steps pass (None: all) and notes them; those of a kind in `always` pass uncounted."""

    def __init__(self, most: int | None, always: frozenset[str] = frozenset()) -> None:
        self.most, self.always = most, always
        self.passed: list[Step] = []
        self.executions: list[Execution] = []

    def allows(self, step: str, subject: str, detail: Any = None) -> bool:
        """Let a step pass, and note it, or refuse it."""
        if step in self.always:
            return True
        if self.most is not None and len(self.passed) >= self.most:
            return False
        self.passed.append(Step(step, subject, detail))
        return True

    def observe(self, executed: Any, inputs: Sequence[Any], sizes: Any = None) -> None:
        """Notes an execution with copies of its arguments, which it may write to."""
        self.executions.append(Execution(executed, [_copy(x) for x in inputs], sizes))
