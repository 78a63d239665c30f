"""The user's tensor outputs, and the values that forward keeps besides (hidden), as results of a Function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....ir.errors import FusegradError
from ...capture.captured import CapturedFunction
from ..results import is_among

Tensor = torch.Tensor


class UserOutputs:
    """count, total: how many tensor outputs there are, and with the hidden ones.

    fixed: the numbers of those that the user marked as not differentiable; an argument that is marked is returned as a
    view, or a copy. written: (number, that of the tensor argument) of each output that is an argument written to.
    """

    def __init__(self, captured: CapturedFunction) -> None:
        forward = captured.forward
        self.described = forward.outputs
        self.places = forward.tensor_outputs
        self.count = len(self.places)
        self.total = self.count + forward.hidden_count
        marked = {(p.kind, p.index) for p in forward.non_differentiable}
        kinds = [forward.outputs[i] for i in self.places]
        self.fixed = {i for i, o in enumerate(kinds) if ("output", i) in marked or (o.kind, o.index) in marked}
        dirty = {p.index for p in forward.dirty}
        self.written = [(i, o.index) for i, o in enumerate(kinds) if o.kind == "input" and o.index in dirty]

    @property
    def has_hidden(self) -> bool:
        """True if forward keeps values that are neither arguments nor outputs."""
        return self.total > self.count

    def split(self, results: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """(the user's, hidden) of one value per result."""
        return results[: self.count], results[self.count :]

    def without_fixed(self, tangents: Sequence[Any]) -> list[Any]:
        """Tangents of the user's outputs, None for those that are marked."""
        return [None if i in self.fixed else t for i, t in enumerate(tangents)]

    def as_views(self, outputs: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
        """Arguments that are returned as they are, as views: torch wants nothing else of what is saved as well."""
        overwritten = [tensors[index] for _, index in self.written]
        returned = [t for t in tensors if not is_among(t, overwritten)]

        def view(i: int, o: Tensor) -> Tensor:
            return o.detach() if i in self.fixed else o.view_as(o)  # a view of what requires grad does, too

        return [view(i, o) if is_among(o, returned) else o for i, o in enumerate(outputs)]

    def of_tensors(self, results: tuple[Any, ...]) -> Sequence[Any]:
        """A user rule's results for the tensor outputs. Raises TangentCountError where their number is wrong."""
        if len(results) != len(self.described):
            raise TangentCountError(expected=len(self.described), got=len(results))
        return [results[i] for i in self.places]


class TangentCountError(FusegradError):
    """jvp returned too few or too many tangents. The text is torch's own."""

    speaks = "torch"
    message = "Function's jvp returned an invalid number of forward gradients (expected {expected} but got {got})"
