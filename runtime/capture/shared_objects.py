"""Objects that a call's ctx shares with its caller: kept with the node, and compared when backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...tracer.opaque.shared import Shared, picture, tensors_of

SharedObjects = tuple[tuple[Any, tuple[Any, ...]], ...]
"""Each object, and the tensors in it at forward."""


class Sharing:
    """The attributes of one specialisation's ctx that are the caller's, and how they looked when it was captured."""

    def __init__(self, shared: Sequence[Shared], args: Sequence[Any]) -> None:
        self.shared = shared
        self.pictures = [picture(s.object_in(args)) for s in shared]

    def objects_of(self, args: Sequence[Any]) -> SharedObjects:
        """The objects of a call."""
        objects = [s.object_in(args) for s in self.shared]
        return tuple([(value, tensors_of(value)) for value in objects])

    def attributes(self, objects: SharedObjects) -> dict[str, Any]:
        """The attributes themselves."""
        return {s.name: value for s, (value, _) in zip(self.shared, objects, strict=True)}

    def changed_attribute(self, objects: SharedObjects) -> str | None:
        """The name of an attribute that is no longer what it was; None where all are."""
        rows = zip(self.shared, self.pictures, objects, strict=True)
        return next((s.name for s, before, (value, tensors) in rows if not _is_unchanged(value, before, tensors)), None)


def _is_unchanged(value: Any, before: Any, tensors: Sequence[Any]) -> bool:
    current = tensors_of(value)
    identical = len(current) == len(tensors) and all(a is b for a, b in zip(current, tensors, strict=True))
    return identical and bool(picture(value) == before)
