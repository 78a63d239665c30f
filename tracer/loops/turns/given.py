"""h[t - 1] in the turns of another loop, and in one of them what the loop of h began with: p[t] in all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..program import MARK, Ref, Step
from .nodes import Node, Use
from .turns import Turns

aten = torch.ops.aten


def keep_what_was_given(loops: Sequence[Turns]) -> None:
    """Reads what each turn was given of the one before, where turns of another loop read that but for one."""
    for turns in loops:
        for offset in range(turns.first, turns.first + turns.period):
            column = [turns.at[i] for i in range(offset, turns.last, turns.period)]
            for slot in range(min(len(node.leaves) for node in column)):
                _keep([other for other in loops if other is not turns], column, slot)


def _keep(loops: Sequence[Turns], column: Sequence[Node], slot: int) -> None:
    """One operand of a step, in all turns."""
    leaves = [node.leaves[slot] for node in column]
    for begin, first, second in (leaves[:3], leaves[:-4:-1]):
        loop = next((loop for loop in loops if loop.is_turn_before(first, second)), None)
        if loop is None or loop.is_turn_before(begin, first):
            continue
        given = _given(loop, begin, first)
        if all(isinstance(leaf, Use | Ref) and leaf in given for leaf in leaves):
            copies = {leaf: _copied(loop, given[leaf], leaf, first) for leaf in leaves}
            for node in column:
                node.leaves[slot] = Use(copies[node.leaves[slot]])
            return


def _given(loop: Turns, begin: Any, first: Use) -> dict[Any, Node]:
    """What a step reads of the turn before, and the step: of the first turn `begin`, of the next one `first`."""
    for at in range(loop.first, loop.first + loop.period):
        pairs = zip(loop.at[at].leaves, loop.at[at + loop.period].leaves, strict=False)
        for slot, pair in enumerate(pairs):
            if pair == (begin, first):
                readers = (loop.at[i] for i in range(at, loop.last, loop.period))
                return {reader.leaves[slot]: reader for reader in readers}
    return {}


def _copied(loop: Turns, reader: Node, leaf: Any, like: Use) -> Node:
    """What a step reads, as a step of its own before that."""
    value = like.node.step.value if like.port is None else like.node.step.value[like.port]
    token = (aten.alias.default, reader.step.token)
    copy = Node(Step(aten.alias.default, ((MARK,), {}), [leaf], token, reader.step.meta, value), [leaf], None)
    loop.inside.setdefault(reader, []).append(copy)
    loop.is_changed = True
    return copy
