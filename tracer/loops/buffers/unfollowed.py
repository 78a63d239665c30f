"""Writes that autograd does not hear of, `with torch.no_grad(): out[t] = h`, or to `h.detach()`.

Where it follows the memory otherwise, gradients pass by such a write, as if what it replaced were still there: no
operation without writes does that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from ...capture.grad_mode import CUT, UNRECORDED
from ...torch_private import memory_of
from ..reasons import NotRolled


def require_followed_writes(graph: fx.Graph) -> None:
    """Raises NotRolled where a graph writes past autograd to memory that autograd follows."""
    first: dict[Any, fx.Node] = {}
    past: set[fx.Node] = set()
    writes: list[tuple[Any, bool]] = []
    for node in graph.nodes:
        memory = _memory(node)
        base = [a for a in node.all_input_nodes if a in past and _memory(a) == memory]
        if node.meta.get(CUT) or base:
            past.add(node)
        writes += [(_memory(a), bool(node.meta.get(UNRECORDED)) or a in past) for a in _written(node)]
        first.setdefault(memory, node)
    followed = {memory for memory, is_past in writes if not is_past}
    if any(is_past and (memory in followed or _may_have_history(first[memory])) for memory, is_past in writes):
        raise NotRolled("it writes past autograd to what autograd follows")


def _may_have_history(node: fx.Node) -> bool:
    """Of what is made by a node: not so of constants, and of what was made with the grad mode off."""
    is_made_of = node.op == "placeholder" or any(isinstance(a.meta.get("val"), Tensor) for a in node.all_input_nodes)
    return is_made_of and not node.meta.get(UNRECORDED) and not _is_filled(node)


def _is_filled(node: fx.Node) -> bool:
    name = getattr(node.target, "_opname", "")
    return name.startswith("new_") or name.endswith("_like")


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that a node writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    given = [node.args[i] if i < len(node.args) else node.kwargs.get(a.name) for i, a in enumerate(schema.arguments)]
    for argument, value in zip(schema.arguments, given, strict=True):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
            yield value


def _memory(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return memory_of(value) if isinstance(value, Tensor) else None
