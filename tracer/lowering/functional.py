"""A captured graph without its writes: autograd refuses to differentiate what was saved and then written to.

    p = exp(x); p.div_(s)   ->   p = exp(x); q = div(p, s), and q wherever p was meant
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree

from ..capture.capture import Session, origin_overridden
from ..capture.grad_mode import CUT, HISTORY
from ..opaque.extension_calls import newest_node, nodes_after
from ..opaque.opaque import TRACED
from ..torch_private import DETACHES
from ..trace import Trace
from .aten import empty_like_fake, from_functional


def writes(gm: fx.GraphModule) -> bool:
    """True if the graph writes to memory that it was given, or made."""
    return any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in gm.graph.nodes)


def without_writes(session: Session, trace: Trace, written_inputs: Collection[int]) -> fx.GraphModule:
    """The graph, with what it makes of the inputs `written_inputs` as further results. Raises CaptureError."""
    gm = trace.graph_module
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    outside = [session.fake_again(n.meta["val"]) for n in placeholders[len(trace.fakes) :]]

    def replayed(*inputs: Any) -> Any:
        own = [g.clone() if i in written_inputs else g for i, g in enumerate(inputs)]
        return (*_Replay(gm).run(*own), *(own[i] for i in sorted(written_inputs)))

    def body(*inputs: Any) -> Any:
        return torch.func.functionalize(replayed, remove="mutations")(*inputs)

    return session.trace(body, [*trace.fakes, *outside], from_source=False).graph_module


class _Replay(fx.Interpreter):
    """Runs the captured graph on functional tensors; every operation stays where it comes from, and keeps its marks."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.cuts = any(node.meta.get(CUT) for node in gm.graph.nodes)

    def run_node(self, node: fx.Node) -> Any:
        self.recorded = node.meta.get("val")
        with origin_overridden(node.meta.get("fusegrad_origin")):
            marks = {key: node.meta[key] for key in HISTORY if key in node.meta}
            if marks:
                return self._run_marked(node, marks)
            last, result = self._newest(), super().run_node(node)
            if self.cuts and node.target not in DETACHES:
                self._mark_made_again(last)
            return result

    def _run_marked(self, node: fx.Node, marks: dict[str, Any]) -> Any:
        """A write is recorded when memory is read: those before are not this operation's, its own is."""
        memory = [self.env[a] for a in node.all_input_nodes]
        _settle(memory)
        last, result = self._newest(), super().run_node(node)
        _settle([*memory, result])
        for recorded in nodes_after(last, self._graph()):
            recorded.meta.update(marks)
        return result

    def _mark_made_again(self, last: fx.Node) -> None:
        """What was detached before a write to its memory is detached again behind it."""
        for recorded in nodes_after(last, self._graph()):
            if recorded.target in DETACHES:
                recorded.meta[CUT] = True

    def _newest(self) -> fx.Node:
        return newest_node(self._graph())

    def _graph(self) -> fx.Graph:
        mode: Any = get_proxy_mode()
        return mode.tracer.graph  # type: ignore[no-any-return]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not hasattr(target, "fusegrad_call"):
            return super().call_function(target, args, kwargs)
        mode: Any = get_proxy_mode()
        inner = pytree.tree_map_only(torch.Tensor, from_functional, (tuple(args), dict(kwargs)))
        operands = pytree.tree_map_only(TRACED, mode.tracer.unwrap_proxy, inner)
        with disable_proxy_modes_tracing():
            fresh = pytree.tree_map_only(torch.Tensor, empty_like_fake, self.recorded)
        proxy = mode.tracer.create_proxy("call_function", target, *operands)
        track_tensor_tree(
            pytree.tree_map_only(torch.Tensor, from_functional, fresh), proxy, constant=None, tracer=mode.tracer
        )
        return fresh


def _settle(values: Any) -> None:
    """Records the writes to the memory of these tensors that are not yet."""
    pytree.tree_map_only(torch.Tensor, from_functional, values)
