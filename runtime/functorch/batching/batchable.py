"""A captured graph in Python that torch's vmap can follow while sizes are symbols.

torch refuses to write a batched value into memory without a batch axis: here memory gets its axis where it is made.
Operations without a batching rule of their own are replaced by `aten_rules.in_lanes`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import Function

from ....tracer.capture.context import ForwardContext
from ....tracer.methods import uses_setup_context
from ....tracer.torch_private import is_batched_here
from .aten_rules import in_lanes, room_for

Tensor = torch.Tensor


def batchable(gm: torch.fx.GraphModule, inline: bool = False) -> torch.fx.GraphModule:
    """The graph with sizes read in Python: the ops that read them have no batching rule.

    inline: the forward of a nested Function that has no vmap rule of its own in place of its call.
    """
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    _give_memory_its_axis(graph)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    writes = any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in calls)
    for node in calls:
        _make_numbers_tensors(node)
        viewed = node.target is torch.ops.aten.view.default and not writes  # what is written to has to stay one memory
        node.target = _seen_as if viewed else _batchable_target(node.target, inline)
    return torch.fx.GraphModule(gm, graph)


def _seen_as(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A view of a lane; a copy where the lanes together lie in memory so that there is none."""
    try:
        return x.view(shape)
    except RuntimeError:
        return x.reshape(shape)


def _make_numbers_tensors(node: torch.fx.Node) -> None:
    """mean / n, n a size: vmap makes a tensor of such a number where a lane is 0-d, which no capture can follow."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    tensors = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
    for i, (argument, value) in enumerate(zip(schema.arguments, node.args, strict=False)):
        if isinstance(argument.type, torch.TensorType) and _is_size(value) and tensors:
            with node.graph.inserting_before(node):
                node.update_arg(i, node.graph.call_function(_number_as, (value, tensors[0])))


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), torch.SymInt)


def _number_as(value: int, like: Tensor) -> Tensor:
    return torch.scalar_tensor(value, dtype=torch.result_type(like, 1), device=like.device)


def _batchable_target(target: Any, inline: bool) -> Any:
    nested = getattr(target, "fusegrad_call", None)
    if inline and isinstance(nested, type) and not _has_vmap_rule(nested):
        return _forward_alone(nested, getattr(target, "fusegrad_needs", ()))
    return in_lanes(target) or target


def _has_vmap_rule(cls: Any) -> bool:
    return bool(getattr(cls, "generate_vmap_rule", False)) or cls.vmap is not Function.vmap


def _forward_alone(cls: Any, needs: tuple[int, ...]) -> Callable[..., Any]:
    """forward of a Function as a plain function, for a graph that is never differentiated: units derive their own."""

    def forward(*args: Any) -> Any:
        ctx = () if uses_setup_context(cls) else (ForwardContext(tuple(i in needs for i in range(len(args)))),)
        return cls.forward(*ctx, *args)

    forward.__name__ = forward.__qualname__ = f"forward_of_{cls.__name__}"
    return forward


# ------------------------------------------------------------------ memory that is written to
def _give_memory_its_axis(graph: torch.fx.Graph) -> None:
    """Memory that the graph makes and writes to is made per lane, where what is written into it differs by lane."""
    roots = _roots(graph)
    writes = [n for n in graph.nodes if _is_write(n)]
    reach = _reached(graph, roots, writes)
    for root in dict.fromkeys(roots[w.args[0]] for w in writes):
        sources = sorted(reach[root], key=lambda n: str(n.name))
        if root.op == "placeholder" or not sources:
            continue
        with graph.inserting_after(root):
            own = graph.call_function(_per_lane, (root, *sources))
        root.replace_all_uses_with(own)
        own.args = (root, *sources)


def _is_write(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable and node.args and isinstance(node.args[0], torch.fx.Node))


def _roots(graph: torch.fx.Graph) -> dict[Any, torch.fx.Node]:
    """The node that made the memory of each node."""
    roots: dict[Any, torch.fx.Node] = {}
    for node in graph.nodes:
        base = _shown(node)
        roots[node] = node if base is None else roots[base]
    return roots


def _shown(node: torch.fx.Node) -> torch.fx.Node | None:
    """The argument whose memory a node's result is."""
    if node.target is operator.getitem:
        return node.args[0] if _shown(node.args[0]) is not None else None  # type: ignore[arg-type,return-value]
    schema = getattr(node.target, "_schema", None)
    aliases = schema is not None and any(r.alias_info is not None for r in schema.returns)
    return node.args[0] if aliases and node.args and isinstance(node.args[0], torch.fx.Node) else None


def _reached(
    graph: torch.fx.Graph, roots: dict[Any, torch.fx.Node], writes: Sequence[torch.fx.Node]
) -> dict[torch.fx.Node, set[torch.fx.Node]]:
    """Per memory the inputs that its content may depend on."""
    reach = {n: {n} if n.op == "placeholder" else set() for n in graph.nodes}
    before = -1
    while before != (before := sum(map(len, reach.values()))):
        for node in graph.nodes:
            for argument in node.all_input_nodes:
                reach[roots[node]] |= reach[roots[argument]]
        for node in writes:
            reach[roots[node.args[0]]] |= reach[node]
    return reach


def _per_lane(memory: Tensor, *sources: Any) -> Tensor:
    """The tensor in memory of its own for every lane, if one of the sources differs by lane."""
    like = next((s for s in sources if is_batched_here(s)), None)
    if like is None or is_batched_here(memory):
        return memory
    return room_for(like, memory.shape, memory.stride(), dtype=memory.dtype, device=memory.device).copy_(memory)
