"""Slips of a user's methods that torch passes over in silence: told once a class, at the user's line."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...tracer.containers import Hole, leaves
from ...tracer.frames import warn_user
from ...tracer.gradients import GradientWarning, lacks_return
from ...tracer.methods import backward_method, method_place
from ..capture.captured import CapturedFunction
from ..settings.config import warns

_told: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()


def warn_of_slips(captured: CapturedFunction) -> None:
    """What forward did: it returned nothing, or tensors in a container, or wrote to an argument, unmarked."""
    if not warns():
        return
    cls: Any = captured.cls
    if not captured.forward.tensor_outputs and lacks_return(cls.forward):  # asks for no trace of what is stored
        _tell(captured, "forward", cls.forward, "has no `return`: the call gives None")
    if (container := _untracked_container(captured)) is not None:
        fact = f"returns a {container}, and autograd does not track the tensors in it"
        _tell(captured, "forward", cls.forward, f"{fact}: `compile(pytree=True)` does")
    for name in _written_unmarked(captured):
        fact = f"writes to `{name}`, which requires a gradient, without `ctx.mark_dirty({name})`"
        _tell(captured, "forward", cls.forward, f"{fact}: to autograd `{name}` is what it was")


def _untracked_container(captured: CapturedFunction) -> str | None:
    """The type of an output that has tensors in it, where no output is a tensor, and a gradient is wanted."""
    if captured.forward.tensor_outputs or not any(captured.forward.needs_input_grad):
        return None
    values = (o.value for o in captured.forward.outputs if any(isinstance(leaf, Hole) for leaf in leaves(o.value)))
    return next((type(value).__name__ for value in values), None)


def _written_unmarked(captured: CapturedFunction) -> Iterator[str]:
    """The arguments that require a gradient and are written to, unmarked."""
    marked = {place.index for place in captured.forward.dirty if place.kind == "input"}
    for i in captured.written_inputs:
        argument = captured.slots[i]
        if i not in marked and argument < captured.count and captured.forward.needs_input_grad[argument]:
            yield captured.names[argument]


def warn_of_no_gradient(captured: CapturedFunction, results: Sequence[Any]) -> None:
    """What backward did: it returned nothing."""
    if any(r is not None for r in results):
        return
    method = backward_method(captured.cls)
    if method is None or not warns() or not lacks_return(method):
        return
    names = "`, `".join(captured.names[: captured.count])
    _tell(captured, "backward", method, f"has no `return`: no gradient reaches `{names}`")


def _tell(captured: CapturedFunction, role: str, method: Callable[..., Any], fact: str) -> None:
    """Once a class and method."""
    told = _told.setdefault(captured.cls, set())
    if role not in told:
        told.add(role)
        warn_user(f"{captured.name}.{role} {fact} ({method_place(method)})", GradientWarning)
