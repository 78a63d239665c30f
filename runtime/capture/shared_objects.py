"""What a call's ctx shares with its caller: kept with the node, and compared when backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...tracer.opaque.shared import Shared, picture, tensors_of

Held = tuple[tuple[Any, tuple[Any, ...]], ...]
"""Each object, and the tensors in it at forward."""


class Sharing:
    """The attributes of one specialisation's ctx that are the caller's, and how they looked when it was captured."""

    def __init__(self, shared: Sequence[Shared], args: Sequence[Any]) -> None:
        self.shared = shared
        self.pictures = [picture(s.object_in(args)) for s in shared]

    def of(self, args: Sequence[Any]) -> Held:
        """The objects of a call."""
        objects = [s.object_in(args) for s in self.shared]
        return tuple([(value, tensors_of(value)) for value in objects])

    def named(self, held: Held) -> dict[str, Any]:
        """The attributes themselves."""
        return {s.name: value for s, (value, _) in zip(self.shared, held, strict=True)}

    def changed(self, held: Held) -> str | None:
        """The name of an attribute that is no longer what it was; None where all are."""
        then = zip(self.shared, self.pictures, held, strict=True)
        return next((s.name for s, before, (value, tensors) in then if not _is_as(value, before, tensors)), None)


def _is_as(value: Any, before: Any, tensors: Sequence[Any]) -> bool:
    now = tensors_of(value)
    same = len(now) == len(tensors) and all(a is b for a, b in zip(now, tensors, strict=True))
    return same and bool(picture(value) == before)
