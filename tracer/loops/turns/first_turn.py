"""The turn before the first one, from its last step backwards: it may lack sums with what comes from a turn before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...sizes import hint_of
from ..affine import number_of
from ..buffers.rewriting import layout_of, turned
from ..program import MARK, Constant, Ref, Step
from .following import UNKNOWN, may_be, next_leaf
from .nodes import Node, Use
from .turns import Incomplete, Turns

aten = torch.ops.aten


@dataclass(frozen=True)
class Earlier:
    """A value at a position of the turn that is being completed, or (None) of one before all turns."""

    position: int | None


@dataclass
class Awaited:
    """What readers read at a position: a value of the program, and where they read it."""

    value: Use
    readers: list[tuple[Node, int]] = field(default_factory=list)


class FirstTurn:
    """From `begin` up to the first position: at each the step of the program, or a sum that it lacks.

    neutral: what nothing comes as. sums: by position, the values that are now added to that.
    """

    def __init__(self, turns: Turns, begin: int, lowest: int) -> None:
        self.turns, self.begin, self.lowest = turns, begin, lowest
        self.start = turns.start
        self.found: dict[int, Node] = {}
        self.awaited: dict[int, Awaited] = {}
        self.neutral: list[Node] = []
        self.sums: dict[int, Use] = {}
        self.edits: list[tuple[Node, int, Node]] = []

    def complete(self) -> None:
        """Raises Incomplete where it lacks anything else, or most of it."""
        turns = self.turns
        self._find()
        turns.put(self.found)
        for node, slot, made in self.edits:
            node.leaves[slot] = Use(made)
        turns.first, turns.start = self.begin, self.start
        turns.is_changed = turns.is_changed or bool(self.neutral)

    def _find(self) -> None:
        turns = self.turns
        for position in range(turns.first, turns.first + turns.period):
            self._await(turns.at[position], self._expected(position))
        for position in range(turns.first - 1, self.begin - 1, -1):
            self.found[position] = self._actual(position) or self._sum(position)
        if 2 * (turns.start - self.start) < turns.first - self.begin:
            raise Incomplete

    def _node(self, position: int) -> Node | None:
        return self.turns.at.get(position) or self.found.get(position)

    def _like(self, position: int) -> Node:
        """The same step of the turn behind."""
        node = self._node(position + self.turns.period)
        assert node is not None
        return node

    # ------------------------------------------------------------------ what is expected
    def _expected(self, position: int) -> list[Any]:
        """What a step reads, as the two turns behind it say."""
        a, b = self._like(position), self._like(position + self.turns.period)
        return [self._expected_leaf(p, q) for p, q in zip(a.leaves, b.leaves, strict=True)]

    def _expected_leaf(self, a: Any, b: Any) -> Any:
        if not self._is_turn_before(a, b):
            return next_leaf(b, a, self.turns.nodes)
        position = self.turns.position[b.node] - 2 * self.turns.period
        return Earlier(position if position >= self.begin else None)

    def _is_turn_before(self, a: Any, b: Any) -> bool:
        """By the position of the second alone: the first may be in a turn that lacks something."""
        if not (isinstance(a, Use) and isinstance(b, Use) and a.port == b.port and b.node in self.turns.position):
            return False
        expected = self.turns.position[b.node] - self.turns.period
        node = self._node(expected)
        return a.node is node or (node is None and expected in self.awaited and self.awaited[expected].value == a)

    def _may_be(self, expected: Any, leaf: Any) -> bool:
        if not isinstance(expected, Earlier):
            return may_be(expected, leaf)
        if expected.position is None:
            return isinstance(leaf, Use | Ref)
        if (known := self._node(expected.position)) is not None:
            return isinstance(leaf, Use) and leaf.node is known
        awaited = self.awaited.get(expected.position)
        return isinstance(leaf, Use) and (awaited is None or awaited.value == leaf)

    def _await(self, node: Node, expected: Sequence[Any]) -> None:
        """Takes note of what a step reads of those that are still to be found."""
        for slot, (leaf, value) in enumerate(zip(expected, node.leaves, strict=True)):
            if isinstance(leaf, Earlier) and leaf.position is not None and self._node(leaf.position) is None:
                if not isinstance(value, Use):
                    raise Incomplete
                self.awaited.setdefault(leaf.position, Awaited(value)).readers.append((node, slot))

    # ------------------------------------------------------------------ what is there, and what is not
    def _actual(self, position: int) -> Node | None:
        if self.start <= self.lowest:
            return None
        node, expected = self.turns.nodes[self.start - 1], self._expected(position)
        if position in self.awaited and self.awaited[position].value.node is not node:
            return None
        if node.step.token != self._like(position).step.token or not all(map(self._may_be, expected, node.leaves)):
            return None
        self._await(node, expected)
        self.start -= 1
        return node

    def _sum(self, position: int) -> Node:
        """A sum with what no turn before has made."""
        like, expected, awaited = self._like(position), self._expected(position), self.awaited.get(position)
        if like.step.target is not aten.add.Tensor or len(expected) != 2 or awaited is None:
            raise Incomplete
        carried = [s for s, leaf in enumerate(expected) if isinstance(leaf, Earlier) and leaf.position is None]
        if len(carried) != 1 or not _is_like(awaited.value, like):
            raise Incomplete
        if not self._may_be(expected[1 - carried[0]], awaited.value):
            raise Incomplete
        return self._made(position, carried[0], awaited)

    def _made(self, position: int, carried: int, awaited: Awaited) -> Node:
        like = self._like(position)
        self.neutral += _nothing(like, awaited.value)
        made = Node(like.step, [Use(self.neutral[-1]) if s == carried else awaited.value for s in range(2)], None)
        self.edits += [(node, slot, made) for node, slot in awaited.readers]
        self._await(made, [UNKNOWN if s == carried else leaf for s, leaf in enumerate(self._expected(position))])
        self.sums[position] = awaited.value
        return made


def _is_like(value: Use, like: Node) -> bool:
    a, b = value.node.step.value, like.step.value
    if value.port is not None or not isinstance(a, torch.Tensor) or not b.dtype.is_floating_point:
        return False
    return a.dtype == b.dtype and [hint_of(n) for n in a.shape] == [hint_of(n) for n in b.shape]


def _nothing(like: Node, value: Use) -> list[Node]:
    """-0.0 everywhere, which added to x leaves it as it is: it lies as x does, or the sum would lie otherwise."""
    own = like.step.value
    order = layout_of(value.node.step.value) or layout_of(own) or list(range(own.ndim))
    turned_back = [order.index(axis) for axis in range(len(order))]
    rows = _rows_of_nothing(like, own.permute(order).contiguous())
    if order == sorted(order):
        return [rows]
    step = turned(like.step, Ref(0), rows.step.value, turned_back)
    return [rows, Node(step, [Use(rows), *step.leaves[1:]], None)]


def _rows_of_nothing(like: Node, value: Any) -> Node:
    leaves = [*map(number_of, value.shape), Constant(-0.0, ("float", "-0.0"))]
    leaves += [Constant(v, (k, repr(v))) for k, v in (("dtype", value.dtype), ("device", value.device))]
    form = (([MARK] * value.ndim, MARK), {"dtype": MARK, "device": MARK})
    token = (aten.full.default, like.step.token)
    return Node(Step(aten.full.default, form, leaves, token, like.step.meta, value), leaves, None)
