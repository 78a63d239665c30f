"""Turns that are alike, step by step, at positions that go on where turns are completed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .nodes import Node, Use


class Incomplete(Exception):
    """A turn cannot be completed. Internal."""


class Turns:
    """Steps by position, from `first` up to `last`; of the program these are the steps from `start` up to `stop`.

    inside: what is made before a step.
    """

    def __init__(self, nodes: Sequence[Node], first: int, last: int, period: int) -> None:
        self.nodes, self.period = nodes, period
        self.first, self.last = self.start, self.stop = first, last
        self.at: dict[int, Node] = {}
        self.position: dict[Node, int] = {}
        self.put({i: nodes[i] for i in range(first, last)})
        self.inside: dict[Node, list[Node]] = {}
        self.is_changed = False

    def put(self, found: Mapping[int, Node]) -> None:
        self.at |= found
        self.position |= {node: i for i, node in found.items()}

    def forget(self, found: Mapping[int, Node]) -> None:
        for i, node in found.items():
            self.at.pop(i, None)
            self.position.pop(node, None)

    def in_order(self) -> list[Node]:
        turns = (self.at[i] for i in range(self.first, self.last))
        return [n for node in turns for n in (*self.inside.get(node, ()), node)]

    def distance(self, a: Any, b: Any) -> int | None:
        """How many positions lie between two values that steps of the turns make, by the same of their results."""
        if not (isinstance(a, Use) and isinstance(b, Use) and a.port == b.port):
            return None
        if a.node not in self.position or b.node not in self.position:
            return None
        return self.position[b.node] - self.position[a.node]

    def is_turn_before(self, a: Any, b: Any) -> bool:
        """Whether two values are the same of two turns, the first right before the second."""
        return self.distance(a, b) == self.period
