"""Questions whether autograd follows a tensor: of what backward is given, the answer is one thing per call.

A graph serves every call where the answer changes nothing: the method is captured with either, and both graphs have to
be the same one. `torch.zeros(shape, requires_grad=v.requires_grad)`, a constant that joins the history of `v`, is so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..scoped_state import variable_within
from ..torch_private import tracked_proxy

Tensor = torch.Tensor
_MOST = 1000
"""Numbers of a constant that are compared."""
ASKS = "it asks whether autograd follows a gradient"


class History:
    """The facts about autograd's history within one backward.

    tensors: those of which it is known. answer: what is said of all others that depend on a gradient.
    place: where that was asked first. asked_inputs: those that it was asked of.
    own_leaves: the constants made with a history.
    """

    def __init__(self, tensors: Sequence[Any], answer: bool) -> None:
        self.tensors, self.answer = tensors, answer
        self.place: str | None = None
        self.asked_inputs: set[str] = set()
        self.own_leaves: set[torch.fx.Node] = set()

    def ask(self, tensor: Tensor, cut: str, location: str) -> bool | None:
        """The answer; None where the tensor itself knows."""
        if any(tensor is t for t in self.tensors) or tensor.requires_grad:
            return None
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        tracer: Any = getattr(get_proxy_mode(), "tracer", None)
        slot = None if tracer is None else tracked_proxy(tracer, tensor)[0]
        inputs = set() if slot is None else _inputs_of(slot.node, lambda n: n.meta.get(cut))
        if tracer is None or (slot is not None and not inputs):
            return None
        self.place = self.place or location
        self.asked_inputs |= inputs
        return self.answer

    def note_result(self, tensor: Any) -> None:
        """Notes what is a leaf of its own, made with a flag."""
        tracer: Any = getattr(get_proxy_mode(), "tracer", None)
        if tracer is None or not isinstance(tensor, Tensor) or not (tensor.requires_grad and tensor.is_leaf):
            return
        slot = tracked_proxy(tracer, tensor)[0]
        if slot is not None and slot.node.op != "placeholder" and _is_made_from_no_input(slot.node):
            self.own_leaves.add(slot.node)

    def shows(self, gm: torch.fx.GraphModule) -> bool:
        """True if some result has a history for the sake of such a constant alone."""
        (output,) = gm.graph.find_nodes(op="output")
        own = {node.name for node in self.own_leaves}
        joined = (r for r in output.all_input_nodes if own & {n.name for n in _behind(r, lambda n: False)})
        return any(not self.asked_inputs <= _inputs_of(r, lambda n: n.name in own or _cuts(n)) for r in joined)


def _behind(node: torch.fx.Node, ends: Callable[[torch.fx.Node], Any]) -> set[torch.fx.Node]:
    waiting, visited = [node], set[torch.fx.Node]()
    while waiting:
        current = waiting.pop()
        if current not in visited and not ends(current):
            visited.add(current)
            waiting += [n for n in current.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    return visited


def _is_made_from_no_input(node: torch.fx.Node) -> bool:
    """True if a value depends on no input by a way that a history could take."""
    return not _inputs_of(node, _cuts)


def _cuts(node: torch.fx.Node) -> bool:
    """True if no history goes through an operation: its result is no float, or is made with the shape alone."""
    value, name = node.meta.get("val"), str(node.target)
    is_float = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return not is_float or "_like" in name or "new_" in name


def _inputs_of(node: torch.fx.Node, ends: Callable[[torch.fx.Node], Any]) -> set[str]:
    """The names of the inputs that it depends on, by ways that do not end before."""
    return {n.name for n in _behind(node, ends) if n.op == "placeholder"}


_known: ContextVar[History | None] = ContextVar("fusegrad_known_history", default=None)


def history() -> History | None:
    """The history within the backward that is captured now."""
    return _known.get()


def known_history(tensors: Sequence[Any], answer: bool = False) -> AbstractContextManager[History]:
    """Within the block a method may ask of these tensors whether autograd follows them; of others it gets an answer."""
    return variable_within(_known, History(tensors, answer))


def text_of(gm: torch.fx.GraphModule) -> list[Any]:
    """The operations of a graph, to be compared with those of another."""
    names = {node: f"%{i}" for i, node in enumerate(gm.graph.nodes)}
    operations = []
    for node in gm.graph.nodes:
        marks = sorted(key for key, mark in node.meta.items() if key.startswith("fusegrad_") and mark is True)
        operands = torch.fx.map_arg((node.args, node.kwargs), lambda n: names[n])
        operations.append((node.op, node.target, str(operands), marks, _constant(gm, node)))
    return operations


def _constant(gm: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
    """The content of a constant that was made during the trace."""
    value = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
    if not isinstance(value, Tensor):
        return value
    return value.dtype, value.device, value.shape, str(value.tolist()) if value.numel() <= _MOST else id(value)
