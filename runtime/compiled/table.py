"""The table of one class: its specializations by key, and the kinds of calls for which a capture failed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...tracer.capture.capture import OpaqueCallError
from ...tracer.trace import CaptureError
from ..specialize.specialization import Specialization
from .budget import alike

REMEMBERED = 1024
"""Exact layouts that a class remembers before it asks the guards again."""
ATTEMPTS = 8
"""Keys for which a capture is tried while none succeeds; after them the method runs as written without a trial."""


class SpecializationTable:
    """Keys to specializations. Exact keys are an index over the facts, whose guards decide on sizes and strides."""

    def __init__(self) -> None:
        self.by_call: OrderedDict[Any, Specialization | None] = OrderedDict()
        """By exact key; None where the user's own methods run."""
        self.by_facts: OrderedDict[Any, list[Specialization]] = OrderedDict()
        self.refused: OrderedDict[Any, CaptureError] = OrderedDict()
        """Captures that failed, by facts."""
        self.opaque_nodes: OrderedDict[Any, OpaqueCallError] = OrderedDict()
        """Opaque calls that a capture met, by facts: a call of the kind is recorded, then split around them."""
        self._opaque_kinds: OrderedDict[Any, OpaqueCallError] = OrderedDict()
        """The same by facts without numbers and identities."""

    def __iter__(self) -> Iterator[Specialization]:
        return (spec for specializations in self.by_facts.values() for spec in specializations)

    def lookup(self, facts: Any, args: Sequence[Any]) -> Specialization | None:
        """The first specialization for these facts whose guard holds for the tensors."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        return next((s for s in self.by_facts.get(facts, ()) if s.captured.guard(tensors)), None)

    def is_hopeless(self, is_unbounded: bool) -> bool:
        """True if every attempt so far failed, and there were enough: a number that changes must not mean another.

        is_unbounded: one is enough where more would have to be compared than can be: no call is found again then.
        """
        return not self.by_facts and len(self.refused) >= (1 if is_unbounded else ATTEMPTS)

    def add(self, facts: Any, spec: Specialization, first: bool = False) -> None:
        """One more specialization for these facts. first: tried before the others."""
        specializations = self.by_facts.setdefault(facts, [])
        specializations.insert(0 if first else len(specializations), spec)

    def set_for_call(self, key: Any, spec: Specialization | None) -> None:
        """Calls with this exact key begin with a specialization; None: they run in eager."""
        self.by_call[key] = spec
        _drop_the_oldest(self.by_call)
        _drop_the_oldest(self.refused)

    def refuse(self, key: Any, facts: Any, error: CaptureError) -> None:
        """Calls with this key, and captures for these facts, run in eager."""
        self.refused[facts] = error.without_frames()
        self.set_for_call(key, None)

    def forget_refusal(self, facts: Any) -> None:
        """Nothing was learnt of the method."""
        self.refused.pop(facts, None)
        self.by_call.clear()

    def add_opaque_node(self, facts: Any, error: OpaqueCallError) -> None:
        """A capture for these facts met an opaque call."""
        self.opaque_nodes[facts] = self._opaque_kinds[alike(facts)] = error.without_frames()
        _drop_the_oldest(self.opaque_nodes)
        _drop_the_oldest(self._opaque_kinds)

    def expect_opaque_node(self, facts: Any) -> None:
        """Expect what was in the way of a call with another number."""
        if (met := self._opaque_kinds.get(alike(facts))) is not None:
            self.opaque_nodes.setdefault(facts, met.without_frames())


def _drop_the_oldest(entries: OrderedDict[Any, Any]) -> None:
    while len(entries) > REMEMBERED:
        entries.popitem(last=False)
