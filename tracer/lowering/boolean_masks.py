"""x[mask] has as many elements as the data says. Where only elementwise things happen to them, the whole tensor does.

v = x[m] * 0.1;  y[m] = v      ->   y = where(m, x * 0.1, y)
x[m].sum()                     ->   where(m, x, 0).sum()
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..torch_private import DETACHES

_ATEN = torch.ops.aten
_PUTS = (_ATEN.index_put_.default, _ATEN.index_put.default)
_COPIES = (_ATEN._to_copy.default, *DETACHES)


def rewrite_masks(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with every such use of a mask rewritten; itself where there is none."""
    if not any(_is_masked(n) for n in gm.graph.nodes):
        return gm
    result = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    _merge_masks(result.graph)
    for mask in dict.fromkeys(n.args[1][0] for n in result.graph.nodes if _is_masked(n)):
        region = _region(mask)
        if region is not None:
            _rewrite(mask, *region)
    result.recompile()
    return result


def _merge_masks(graph: fx.Graph) -> None:
    """g[g > 0] = f(g[g > 0]) computes its mask twice: once will do where nothing is written in between."""
    earlier: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
            earlier.clear()
        elif isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].dtype is torch.bool:
            first = earlier.setdefault((node.target, node.args, tuple(node.kwargs.items())), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _is_masked(node: fx.Node) -> bool:
    """x[m] with one mask of the shape of a floating-point x."""
    if node.target is not _ATEN.index.Tensor or len(node.args[1]) != 1:  # type: ignore[arg-type]
        return False
    x, mask = node.args[0].meta["val"], node.args[1][0].meta["val"]  # type: ignore[union-attr, index]
    return bool(mask.dtype is torch.bool and mask.dim() == x.dim() and x.is_floating_point())


def _region(mask: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """(the masked reads, where their elements end up): None where something else happens to them in between."""
    if any(_writes(user, mask) for user in mask.users):
        return None
    reads = [n for n in mask.users if _is_masked(n)]
    # From the reads on: each user is elementwise, and so inside, or an end; anything else makes all of it unfit.
    inside, ends, todo = dict.fromkeys(reads), dict[fx.Node, None](), list(reads)
    while todo:
        for user in todo.pop().users:
            if user in inside or user in ends:
                continue
            if _ends(user, mask):
                ends[user] = None
            elif _is_elementwise(user):
                inside[user] = None
                todo.append(user)
            else:
                return None
    fits = all(a in inside or _is_number(a) for n in inside if n not in reads for a in n.all_input_nodes)
    return (reads, list(ends)) if fits and all(e.args[0] not in inside for e in ends if e.target in _PUTS) else None


def _writes(node: fx.Node, to: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and node.args[0] is to


def _ends(node: fx.Node, mask: fx.Node) -> bool:
    if node.target in _PUTS:
        return list(node.args[1]) == [mask] and not (len(node.args) > 3 and node.args[3])  # type: ignore[arg-type]
    return node.target is _ATEN.sum.default and not node.kwargs


def _is_elementwise(node: fx.Node) -> bool:
    return node.target in _COPIES or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _rewrite(mask: fx.Node, reads: list[fx.Node], ends: list[fx.Node]) -> None:
    for node in ends:
        _replace(node, lambda node=node: _dense_end(node, mask))  # type: ignore[misc]
    for node in reads:
        _replace(node, lambda node=node: node.graph.call_function(_ATEN.clone.default, (node.args[0],)))  # type: ignore[misc]


def _dense_end(node: fx.Node, mask: fx.Node) -> fx.Node:
    call = node.graph.call_function
    if node.target is _ATEN.sum.default:
        zero = call(_ATEN.zeros_like.default, (node.args[0],))
        return call(_ATEN.sum.default, (call(_ATEN.where.self, (mask, node.args[0], zero)),))
    base, values = node.args[0], node.args[2]
    merged = call(_ATEN.where.self, (mask, values, base))
    return call(_ATEN.copy_.default if node.target is _PUTS[0] else _ATEN.copy.default, (base, merged))


def _replace(node: fx.Node, make: Callable[[], fx.Node]) -> None:
    """`node` by what `make` adds in its place, which inherits what is known about it."""
    before = node.prev
    with node.graph.inserting_before(node):
        new = make()
    while (before := before.next) is not node:
        before.meta.update({k: v for k, v in node.meta.items() if k != "val"})
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
