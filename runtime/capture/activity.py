"""Dependence of a captured graph's results on its inputs: a result without one is no differentiable output.

In eager the gradient `g * w` requires grad only where `g` or `w` does; a Function would say so of all its outputs.
Where in doubt a result depends: too much costs a zero, too little would lose a gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import torch

from ...tracer.capture.grad_mode import CUT, UNRECORDED
from ...tracer.trace import Trace

Homes: TypeAlias = dict[torch.fx.Node, torch.fx.Node]
aten = torch.ops.aten
_LIKE = ("zeros", "ones", "full", "empty", "rand", "randn")
_SHAPE_ONLY = {
    *(getattr(aten, f"{name}_like").default for name in _LIKE),
    *(getattr(aten, f"new_{name}").default for name in ("zeros", "ones", "full", "empty")),
}
"""Operations that read nothing but the shape and dtype of their argument."""
_KEYS = {False: "fusegrad_sources", True: "fusegrad_sources_of_tangents"}


def sources_of(trace: Trace, tangents: bool = False) -> list[frozenset[int]]:
    """Per result the inputs (by number) that its values may depend on, by a way of floating point numbers.

    tangents: by a way of forward mode, which goes on where the grad mode is off.
    """
    meta, key = trace.graph_module.meta, _KEYS[tangents]
    if key not in meta:
        meta[key] = _compute_sources(trace.graph_module.graph, tangents)
    return meta[key]  # type: ignore[no-any-return]


def _compute_sources(graph: torch.fx.Graph, tangents: bool) -> list[frozenset[int]]:
    (results,) = graph.find_nodes(op="output")[0].args
    cut = {node for node in graph.nodes if _is_cut(node, tangents)}
    reach = _reach_of_nodes(graph, _memory_roots(graph, cut), cut)
    return [reach[r] if isinstance(r, torch.fx.Node) else frozenset() for r in results]


def _is_cut(node: torch.fx.Node, tangents: bool) -> bool:
    """True if no dependence leads through an operation. A view made with grad mode off follows its base."""
    if node.meta.get(UNRECORDED):
        return not tangents and (bool(node.meta.get(CUT)) or not _is_view(node))
    return bool(node.meta.get(CUT))


def _is_view(node: torch.fx.Node) -> bool:
    return _base(node) is not None and not _written_arguments(node)


def _reach_of_nodes(
    graph: torch.fx.Graph, home: Homes, cut: Collection[torch.fx.Node]
) -> dict[torch.fx.Node, frozenset[int]]:
    """Per node what reaches its memory, by whatever is written there: it may be read before, or after that."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    reach = dict.fromkeys(set(home.values()), frozenset[int]()) | {n: frozenset({i}) for i, n in enumerate(inputs)}
    before = None
    while before != reach:
        before = dict(reach)
        for node in (n for n in graph.nodes if n.op not in ("placeholder", "output") and n not in cut):
            sources = _sources_through(node, {a: reach[home[a]] for a in node.all_input_nodes})
            for target in (node, *_written_arguments(node)):
                reach[home[target]] |= sources
    return {node: reach[at] for node, at in home.items()}


def _memory_roots(graph: torch.fx.Graph, cut: Collection[torch.fx.Node]) -> Homes:
    """Per node the first one with its memory. What was detached counts as apart; what was written to does not."""
    home: Homes = {}
    for node in graph.nodes:
        base = None if node in cut and not _written_arguments(node) else _base(node)
        home[node] = node if base is None else home[base]
    return home


def _base(node: torch.fx.Node) -> torch.fx.Node | None:
    """The argument whose memory a node's result shows."""
    if node.target is operator.getitem:
        return node.all_input_nodes[0]
    return next((a for a, info in _arguments(node) if info is not None and _is_returned(node, info)), None)


def _is_returned(node: torch.fx.Node, info: Any) -> bool:
    returned = (r.alias_info for r in node.target._schema.returns)  # type: ignore[union-attr]
    return any(r is not None and r.before_set & info.before_set for r in returned)


def _written_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    return [a for a, info in _arguments(node) if info is not None and info.is_write]


def _arguments(node: torch.fx.Node) -> list[tuple[torch.fx.Node, Any]]:
    """The tensors that an operation of torch takes, each with what the schema says of its memory."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    values = [node.args[i] if i < len(node.args) else node.kwargs.get(a.name) for i, a in enumerate(schema.arguments)]
    pairs = zip(values, schema.arguments, strict=True)
    flat = ((v, a.alias_info) for value, a in pairs for v in (value if isinstance(value, list | tuple) else [value]))
    return [(v, info) for v, info in flat if isinstance(v, torch.fx.Node)]


def _sources_through(node: torch.fx.Node, reach: dict[torch.fx.Node, frozenset[int]]) -> frozenset[int]:
    if node.target in _SHAPE_ONLY or not _may_be_float(node):
        return frozenset()
    return frozenset().union(*(reach[a] for a in node.all_input_nodes))


def _may_be_float(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return not isinstance(value, int | torch.SymInt | torch.SymBool)


_BY_STRIDES = {
    aten.view.default, aten.view.dtype, aten.as_strided.default, aten._reshape_alias.default,
    aten.view_as_real.default, aten.view_as_complex.default,
}  # fmt: skip
"""Views that are there for some strides alone."""


def takes_gaps(node: torch.fx.Node) -> bool:
    """True if operations may be given a tensor with gaps for this input, which was captured without, as eager's are.

    Sums and contractions add in another order along other strides; elementwise it is all one.
    """
    waiting = [node]
    while waiting:
        alias = waiting.pop()
        for user in alias.users:
            if user.op == "output" or _is_size_query(user):
                continue
            if not hasattr(user.target, "_schema") or user.target in _BY_STRIDES or alias in _written_arguments(user):
                return False
            if _base(user) is alias:
                waiting.append(user)
    return True


def _is_size_query(node: torch.fx.Node) -> bool:
    return node.target in (aten.sym_size.int, aten.sym_numel.default)


def independent_results(trace: Trace, of: Sequence[int], tangents: bool = False) -> list[int]:
    """The results that depend on none of these inputs."""
    inputs = frozenset(of)
    return [i for i, sources in enumerate(sources_of(trace, tangents)) if not sources & inputs]
