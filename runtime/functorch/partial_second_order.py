"""A double backward that eager leaves partial: forward saved a value that is neither an argument nor an output.

Such a value has no history, so that plain autograd takes it for a constant. The result stays eager's, with a warning
once a class; under torch.func the value is an output of forward, and the second derivative is whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ...ir.program import ValueRef
from ...tracer.frames import warn_user
from ..capture.activity import sources_of
from ..capture.captured import name_at
from ..capture.guards import is_float
from ..settings.config import warns

if TYPE_CHECKING:
    from ..specialize.specialization import Specialization

_warned: weakref.WeakSet[type] = weakref.WeakSet()


class PartialGradientWarning(UserWarning):
    """A second derivative lacks what goes through a value that forward saved in between, as it does in eager."""


def warn_once(spec: Specialization, args: Sequence[Any], needed: Sequence[bool], relevant: Collection[int]) -> None:
    """args: of backward, the residuals first; needed: which of them are differentiated; relevant: those that matter."""
    captured = spec.captured
    if captured.cls in _warned or not warns():
        return
    for i, place in enumerate(captured.residual_places):
        if i in relevant and is_float(args[i]) and not needed[i] and place is not None and _moves(spec, place):
            _warned.add(captured.cls)
            warn_user(_message(spec, place), PartialGradientWarning)
            return


def _moves(spec: Specialization, place: ValueRef) -> bool:
    """True if a value in between depends on an argument that requires grad."""
    captured = spec.captured
    if place.kind != "hidden":
        return False
    sources = sources_of(captured.forward.trace)[len(captured.forward.fake_outputs) + place.index]
    return any(captured.forward.needs_input_grad[captured.slots[i]] for i in sources if i < len(captured.slots))


def _message(spec: Specialization, place: ValueRef) -> str:
    captured = spec.captured
    return (
        f"{captured.name}: a double backward takes `{name_at(captured, place)}`, which forward saved and which is "
        f"neither an argument nor an output, for a constant, as it does in eager: second derivatives are partial "
        f"({captured.backward_place()}). Save arguments or outputs alone, or use torch.func, where they are whole."
    )
