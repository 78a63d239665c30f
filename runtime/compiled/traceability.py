"""Which methods of a class may be captured: what its author declares, and what their code does at every call.

A method that must not be captured is *opaque*: it runs as written, on real tensors, as often as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...tracer.declared import ROLES, Option, declarations
from ...tracer.methods import method_place, methods, plain_function
from ...tracer.reads.reads import (
    Effect,
    ForeignFunctions,
    Reads,
    backward_effects,
    certain_effects,
    each_method_once,
    scan,
)
from ...tracer.trace import CaptureError
from ..capture.segmented import CATCHES, Segmented


class Traceability:
    """The roles of a class that may be captured: declared, or by effects in the code that a graph would lose."""

    def __init__(self, cls: type, option: Option | None = None) -> None:
        self.segmented, self.option = Segmented(cls), option
        self.declared = declarations(cls, option)
        self.effects: dict[str, Effect | None] = {}
        self.foreign = ForeignFunctions()

    @property
    def cls(self) -> type:
        """The class, with what cannot be captured taken out of its methods."""
        return self.segmented.cls

    def may_segment(self, role: str) -> bool:
        """True if statements of a role may be taken out: its author promises nothing, and fullgraph is off."""
        return self.declared[role].value is None and self.segmented.allowed and role != "jvp"

    def sources(self, role: str) -> list[Callable[..., Any]]:
        """The user's code of a role."""
        if (function := plain_function(self.cls)) is not None:
            return [function]  # every role is made of it
        written = methods(self.cls)
        return [written[name] for name in ROLES[role] if name in written]

    def sources_by_name(self, role: str) -> dict[str, Callable[..., Any]]:
        """The methods of a role; none of a plain function."""
        return {n: m for n, m in methods(self.cls).items() if n in ROLES[role]}

    def take_out(self, role: str, error: CaptureError) -> bool:
        """Take out of a role what a capture failed at; whether it is worth another attempt."""
        return self.may_segment(role) and self.segmented.take_out(self.sources_by_name(role), error)

    def roles(self) -> Iterator[str]:
        """The roles that the user wrote a method for."""
        return (role for role in ROLES if self.sources(role))

    def scan(self) -> Reads:
        """The reads of the methods that may be captured; finds out which may not."""
        with each_method_once():
            return self._scanned()

    def _scanned(self) -> Reads:
        tried = [role for role in self.roles() if self.declared[role].value is not False]
        self.segmented.forget_exchanged()
        for role in filter(self.may_segment, tried):
            self.segmented.take_out_effects(self.sources_by_name(role))
        reads = self._scan(tried)
        if self.segmented.give_up_clashing(reads):
            reads = self._scan(tried)
        if "backward" in tried and self.effects.get("backward") is None:
            seen = [e for method in self.sources("backward") for e in backward_effects(method)]
            self.effects["backward"] = next((e for e in seen if e.certain), None)
            reads.effects += [e for e in seen if not e.certain]
        self.segmented.add_reads(reads)
        return reads

    def _scan(self, tried: list[str]) -> Reads:
        """The reads of the methods of these roles, but for those that have effects."""
        self.effects = {role: next(iter(certain_effects(*self.sources(role))), self._caught(role)) for role in tried}
        sources = (f for role in tried if self.effects[role] is None for f in self.sources(role))
        reads = scan(*sources, foreign=self.foreign)
        if reads.queries_layout and reads.is_whole:
            reads.queries_layout = scan(*self.sources("backward"), foreign=self.foreign).queries_layout
        return reads

    def _caught(self, role: str) -> Effect | None:
        places = (self.segmented.catches(name) for name in self.sources_by_name(role))
        return next((Effect(CATCHES, place) for place in places if place is not None), None)

    def opaque(self, role: str) -> CaptureError | None:
        """The reason why a role must not be captured; None where it may be tried."""
        declared = self.declared[role]
        if declared.value is False:
            return CaptureError(reason=declared.how, where=method_place(next(iter(self.sources(role)), None)))
        effect = self.effects.get(role)
        return None if effect is None else CaptureError(reason=effect.reason, where=effect.where)

    def is_opaque(self, role: str) -> bool:
        """True if `opaque` has a reason."""
        return self.declared[role].value is False or self.effects.get(role) is not None

    def declared_opaque(self) -> list[str]:
        """The roles that the author keeps out of any capture."""
        return [role for role in self.roles() if self.declared[role].value is False]


def switches_grad_mode(cls: type) -> bool:
    """True if a class was made of a plain function that does."""
    return hasattr(cls, "_fusegrad_switches") and cls._fusegrad_switches.is_unrecorded
