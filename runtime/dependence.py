"""Which results of a captured graph depend on which of its inputs: what does not is no differentiable output.

In eager the gradient `g * w` requires grad only where `g` or `w` does; a Function would say so of all its outputs.
Where in doubt a result depends: too much costs a zero, too little would lose a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..tracer.capture import CUT, Trace

aten = torch.ops.aten
_LIKE = ("zeros", "ones", "full", "empty", "rand", "randn")
_SHAPE_ONLY = {
    *(getattr(aten, f"{name}_like").default for name in _LIKE),
    *(getattr(aten, f"new_{name}").default for name in ("zeros", "ones", "full", "empty")),
}
"""Operations that read nothing but the shape and dtype of their argument."""
_KEY = "fusegrad_sources"


def sources_of(trace: Trace) -> list[frozenset[int]]:
    """Per result the inputs (by number) that its values may depend on, by a way of floating point numbers."""
    meta = trace.graph_module.meta
    if _KEY not in meta:
        meta[_KEY] = _found(trace.graph_module.graph)
    return meta[_KEY]  # type: ignore[no-any-return]


def _found(graph: torch.fx.Graph) -> list[frozenset[int]]:
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    (results,) = graph.find_nodes(op="output")[0].args
    if any(map(_writes, graph.nodes)):  # a value may come by way of memory
        return [frozenset(range(len(inputs)))] * len(results)
    reach: dict[torch.fx.Node, frozenset[int]] = {n: frozenset({i}) for i, n in enumerate(inputs)}
    for node in graph.nodes:
        if node not in reach:
            reach[node] = _reached(node, reach)
    return [reach[r] if isinstance(r, torch.fx.Node) else frozenset() for r in results]


def _reached(node: torch.fx.Node, reach: dict[torch.fx.Node, frozenset[int]]) -> frozenset[int]:
    if node.target in _SHAPE_ONLY or node.meta.get(CUT) or not _may_be_float(node):
        return frozenset()
    return frozenset().union(*(reach[a] for a in node.all_input_nodes))


def _may_be_float(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return not isinstance(value, int | torch.SymInt | torch.SymBool)


def _writes(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def independent(trace: Trace, of: Sequence[int]) -> list[int]:
    """The results that depend on none of these inputs."""
    wanted = frozenset(of)
    return [i for i, sources in enumerate(sources_of(trace)) if not sources & wanted]
