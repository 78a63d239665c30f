"""The memory that a captured graph's own results would take at given sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..values.sizes import Sizes, traced_numbers

Tensor = torch.Tensor


def intermediate_bytes(gm: torch.fx.GraphModule, sizes: Sizes) -> int:
    """Bytes that the graph's own results would take, all at once, at these sizes."""
    total = 0
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor) and not _is_view(node):
            total += math.prod(_shape_at(value.shape, sizes)) * value.element_size()
    return total


def _shape_at(shape: Sequence[Any], sizes: Sizes) -> tuple[int, ...]:
    """A shape in which a size that depends on data (of x[mask], say) counts as the largest of the others."""
    symbols = {s for n in shape if not isinstance(n, int) for s in n.node.expr.free_symbols}
    largest = max(sizes.values(), default=1)
    return traced_numbers(shape, {s: sizes.get(s, largest) for s in symbols})


def _is_view(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)
