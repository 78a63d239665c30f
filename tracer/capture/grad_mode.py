"""The grad mode that a backward is in where its call is recorded: on at first, then as its own code turns it.

A capture runs with grad mode off, and so does the first order of a backward that is differentiated. What `no_grad`
keeps out of the history is marked in the graph, and costs no node; `runtime/capture/activity.py` reads the marks.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from ..loops.node import operations
from ..opaque.extension_calls import newest_node, nodes_after
from ..scoped_state import variable_within
from ..torch_private import grad_switch

UNRECORDED = "fusegrad_unrecorded"
"""In the meta of a node: the user's code ran it with grad mode off, which forward mode does not heed."""

CUT = "fusegrad_cut"
"""In the meta of a node: the user detached there. Autograd detaches too, what it saves, and that cuts nothing."""
UNVERSIONED = "fusegrad_unversioned"
"""In the meta of a node: the user took `.data` there, whose writes no version counter and no history hears of."""
HISTORY = (CUT, UNVERSIONED, UNRECORDED)
"""The marks of nodes whose results autograd does not follow as it would those of others."""


def has_unrecorded(trace: torch.fx.GraphModule) -> bool:
    """True if some operation of a graph, or of a loop in it, has tangents and no history."""
    return any(node.meta.get(UNRECORDED) for node in operations(trace.graph.nodes))


_KEEPS_AT_ONCE = torch.set_grad_enabled
"""The manager that notes the former mode when it is made; the other managers do when they are entered."""


class GradMode:
    """Follows the switches of one run of a method, and marks the nodes that it leaves while the mode is off."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph, self.is_on, self.last = graph, True, newest_node(graph)
        self.inference = torch.is_inference_mode_enabled()
        self.mode_before: dict[int, tuple[Any, bool]] = {}  # by the manager, held: the mode that it goes back to

    def note_switch(self, is_on: bool) -> str | None:
        """The grad mode is switched by the user's code; why that cannot be followed, if it cannot."""
        self.settle()
        method, manager = _switching()
        if manager is None and not is_on:
            return "it turns the grad mode off by a private name of torch"
        if method in ("__exit__", "__call__"):
            self.is_on = self.mode_before.get(id(manager), (None, is_on))[1]
            return None
        if method == "__init__" or (manager is not None and not isinstance(manager, _KEEPS_AT_ONCE)):
            self.mode_before[id(manager)] = manager, self.is_on
        self.is_on = is_on
        return None

    def settle(self) -> None:
        """The nodes since the last switch belong to the mode that it began."""
        for node in () if self.is_on else nodes_after(self.last, self.graph):
            node.meta[UNRECORDED] = True
        self.last = newest_node(self.graph)


_BETWEEN = ("__torch_function__", "why_not_in_its_mode")
_OF_MANAGERS = torch.no_grad.__enter__.__code__.co_filename


def _switching() -> tuple[str | None, Any]:
    """The method of `torch.no_grad()` or its like that switches, and of which object: one of them may use another.

    The mode that it goes back to is no use: it read that of the capture.
    """
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in _BETWEEN:
        frame = frame.f_back
    method_and_manager: tuple[str | None, Any] = (None, None)
    while frame is not None and frame.f_code.co_filename == _OF_MANAGERS:
        method_and_manager = frame.f_code.co_name, frame.f_locals.get("self")
        frame = frame.f_back
    return method_and_manager


class Switches(TorchFunctionMode):
    """Notes what has tangents and no history: operations with grad mode off, gradients without `create_graph`."""

    is_unrecorded = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = func is torch.autograd.grad and not keeps_graph(*args, **(kwargs or {}))
        self.is_unrecorded = self.is_unrecorded or plain or (func is grad_switch and not args[0])
        return func(*args, **(kwargs or {}))


def keeps_graph(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None, create_graph: bool = False, **_: Any
) -> bool:
    """True if `torch.autograd.grad` with these arguments returns gradients that can be differentiated."""
    return create_graph


_following: ContextVar[GradMode | None] = ContextVar("fusegrad_grad_mode", default=None)


def followed_mode() -> GradMode | None:
    """The mode of the backward that is captured in this thread; None where none is."""
    return _following.get()


def why_not_in_its_mode(func: Any, args: Sequence[Any]) -> str | None:
    """The reason why a call of torch keeps the backward that is captured from being followed; None where nothing
    does."""
    mode = followed_mode()
    if mode is None:
        return None
    if torch.is_inference_mode_enabled() and not mode.inference:
        return "it turns inference mode on"
    return mode.note_switch(args[0]) if func is grad_switch else None


@contextmanager
def following_grad_mode() -> Iterator[None]:
    """Within the block a method runs that autograd may record; nothing happens where nothing is captured."""
    tracer: Any = getattr(get_proxy_mode(), "tracer", None)
    mode = None if tracer is None else GradMode(tracer.graph)
    try:
        with variable_within(_following, mode):
            yield
    finally:
        if mode is not None:
            mode.settle()
