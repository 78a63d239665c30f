"""Random numbers in a plain function: its derived backward runs the body again, and would draw other ones.

A Function class says itself what its backward reads; a derivative of its forward would draw anew, too.
`fusegrad.random` draws the same numbers from the same seed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import BuiltinFunctionType
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from ...tracer.loops.node import loop_of
from ...tracer.trace import CaptureError
from ..capture.activity import sources_of
from ..capture.captured_backward import predicted_kinds
from ..capture.guards import is_float
from ..capture.redraw import first_draw

if TYPE_CHECKING:
    from .specialization import Specialization


def require_none(specialization: Specialization) -> None:
    """Raise CaptureError where a plain function draws random numbers, by itself or in a Function that it calls."""
    captured = specialization.captured
    if not captured.is_plain:
        return
    nodes = captured.forward.trace.graph_module.graph.nodes
    if (node := first_draw(nodes)) is None and any(map(_is_call, nodes)):
        node = first_draw(_of_backward(specialization))
    if node is not None:
        _, where, _ = node.meta.get("fusegrad_origin") or (None, captured.forward_place(), None)
        reason = f"it draws random numbers (`{node.target}`), which its derived backward would draw anew"
        raise CaptureError(reason=reason, where=where)


def why_not_differentiated(specialization: Specialization, derived: bool) -> str | None:
    """The reason why torch.func may not differentiate forward: it would draw anew. None where it may, or need not.

    derived: whether the rule that is asked for is forward's own derivative. What forward kept in between has one, too.
    """
    forward = specialization.captured.forward
    node = first_draw(forward.trace.graph_module.graph.nodes)
    kept = zip(forward.fake_hidden, sources_of(forward.trace)[len(forward.fake_outputs) :], strict=True)
    if node is None or not (derived or any(is_float(f) and sources for f, sources in kept)):
        return None
    return f"it draws random numbers (`{node.target}`), which a derivative of it would draw anew"


def _of_backward(specialization: Specialization) -> Iterable[Node]:
    """The nodes of the commonest backward, in which autograd has followed the calls."""
    try:
        return specialization.backward.entry(predicted_kinds(specialization.captured)).trace.graph_module.graph.nodes
    except CaptureError:
        return ()


def _is_call(node: Node) -> bool:
    """True for what may call a Function: no operation, no arithmetic of sizes, no loop, whose steps are operations."""
    plain = isinstance(node.target, torch._ops.OpOverload | BuiltinFunctionType) or loop_of(node.target) is not None
    return node.op == "call_function" and not plain
