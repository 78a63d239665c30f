"""The turn behind the last one, which may lack what nothing reads."""

from __future__ import annotations

from typing import Any

from .following import UNKNOWN, is_repeatable, may_be, next_leaf
from .nodes import Node, Use
from .turns import Incomplete, Turns


class LastTurn:
    """From the position behind turns up to `end`: at each the step of the program, or one that it lacks."""

    def __init__(self, turns: Turns, end: int) -> None:
        self.turns, self.end, self.stop = turns, end, turns.stop
        self.found: dict[int, Node] = {}

    def complete(self) -> None:
        """Raises Incomplete where most of it would have to be made."""
        turns = self.turns
        try:
            self._find()
        except Incomplete:
            turns.forget(self.found)
            raise
        turns.is_changed = turns.is_changed or any(node.at is None for node in self.found.values())
        turns.last, turns.stop = self.end, self.stop

    def _find(self) -> None:
        for position in range(self.turns.last, self.end):
            self.found[position] = node = self._actual(position) or self._made(position)
            self.turns.put({position: node})
            self.stop += node.at is not None
        if 2 * (self.stop - self.turns.stop) < self.end - self.turns.last:
            raise Incomplete

    def _actual(self, position: int) -> Node | None:
        """The step of the program that is there; None where it is another one."""
        turns = self.turns
        node = turns.nodes[self.stop] if self.stop < len(turns.nodes) else None
        if node is None or node.step.token != turns.at[position - turns.period].step.token:
            return None
        return node if all(map(may_be, self._expected(position), node.leaves)) else None

    def _expected(self, position: int) -> list[Any]:
        a, b = (self.turns.at[position - n * self.turns.period] for n in (2, 1))
        return [self._expected_leaf(p, q) for p, q in zip(a.leaves, b.leaves, strict=True)]

    def _expected_leaf(self, a: Any, b: Any) -> Any:
        turns = self.turns
        if not turns.is_turn_before(a, b):
            return next_leaf(a, b, turns.nodes)
        node = turns.at.get(turns.position[b.node] + turns.period)
        return UNKNOWN if node is None else Use(node, b.port)

    def _made(self, position: int) -> Node:
        like, leaves = self.turns.at[position - self.turns.period], self._expected(position)
        if not is_repeatable(like, leaves) or not all(map(self._is_there, leaves)):
            raise Incomplete
        return Node(like.step, leaves, None)

    def _is_there(self, leaf: Any) -> bool:
        """Whether what is read is made before."""
        if not isinstance(leaf, Use) or leaf.node in self.turns.position:
            return True
        return leaf.node.at is not None and leaf.node.at < self.stop
