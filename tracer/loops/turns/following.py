"""What a step of the next turn reads, by what the same step of two turns reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from ...sizes import hint_of
from ..affine import ONE
from ..program import Ref
from .nodes import Node, Use

aten = torch.ops.aten


class Unknown:
    """What the turns alike do not tell."""


UNKNOWN = Unknown()


def follows(nodes: Sequence[Node], i: int, period: int) -> bool:
    """Whether what a step reads follows from what the same of the two turns before it read."""
    a, b, c = nodes[i - 2 * period].leaves, nodes[i - period].leaves, nodes[i].leaves
    return len(a) == len(b) == len(c) and all(next_leaf(p, q, nodes) == r for p, q, r in zip(a, b, c, strict=True))


def next_leaf(a: Any, b: Any, nodes: Sequence[Node]) -> Any:
    """The leaf that follows two, of turns one after the other."""
    if isinstance(a, Use) and isinstance(b, Use):
        return _next_use(a, b, nodes)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        found = [next_leaf(p, q, nodes) for p, q in zip(a, b, strict=True)]
        return UNKNOWN if UNKNOWN in found else found
    if isinstance(a, Ref) and isinstance(b, Ref) and a.step == b.step:
        return Ref(b.step, _next_port(a.port, b.port))
    if isinstance(a, dict) and isinstance(b, dict):
        return {k: n for k in {**a, **b} if (n := 2 * b.get(k, 0) - a.get(k, 0))}
    return b if type(a) is type(b) and a == b else UNKNOWN


def _next_port(a: int | None, b: int | None) -> int | None:
    return b if a is None or b is None else 2 * b - a


def _next_use(a: Use, b: Use, nodes: Sequence[Node]) -> Any:
    if a.node is b.node:
        port = _next_port(a.port, b.port)
        return Use(b.node, port) if port is None or port >= 0 else UNKNOWN
    if a.node.at is None or b.node.at is None or a.port != b.port:
        return UNKNOWN
    at = 2 * b.node.at - a.node.at
    is_there = 0 <= at < len(nodes) and nodes[at].step.token == b.node.step.token
    return Use(nodes[at], b.port) if is_there else UNKNOWN


def may_be(expected: Any, leaf: Any) -> bool:
    """Whether a leaf is what is expected, or a value where nothing is."""
    return bool(expected == leaf) or (expected is UNKNOWN and isinstance(leaf, Use | Ref))


def is_repeatable(like: Node, leaves: Sequence[Any]) -> bool:
    """Whether an operation may be done once more: it draws nothing, and reads no place that there is not."""
    target = like.step.target
    is_told = not any(leaf is UNKNOWN or isinstance(leaf, list) for leaf in leaves)
    if not is_told or not all(map(_is_same_port, like.leaves, leaves)):
        return False
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    pairs = enumerate(zip(like.leaves, leaves, strict=True))
    moved = [s for s, (a, b) in pairs if isinstance(a, dict) and a != b]
    if not moved:
        return True
    if target is not aten.select.int or moved != [2] or not isinstance(leaves[0], Use):
        return False
    dim, index = (leaf.get(ONE, 0) if leaf.keys() <= {ONE} else -1 for leaf in leaves[1:])
    size: int = hint_of(_value_of(leaves[0]).shape[dim])
    return 0 <= index < size


def _value_of(use: Use) -> Any:
    """What is read: of an operation with several results, such as `chunk`, one of them."""
    value = use.node.step.value
    return value if use.port is None else value[use.port]


def _is_same_port(a: Any, b: Any) -> bool:
    """Whether of two values that are one of several, both are the same one."""
    return not isinstance(a, Use | Ref) or (isinstance(b, Use | Ref) and a.port == b.port)
