"""Steps that can be moved: what they read are other steps, not their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..program import Program, Ref, Step


class Node:
    """A step that can be moved: what it reads are other nodes. at: where it was in the program, None for a new one."""

    def __init__(self, step: Step, leaves: list[Any], at: int | None) -> None:
        self.step, self.leaves, self.at = step, leaves, at


@dataclass(frozen=True)
class Use:
    """A result of a node."""

    node: Node
    port: int | None = None


def linked(steps: Sequence[Step]) -> list[Node]:
    nodes: list[Node] = []
    for at, step in enumerate(steps):
        nodes.append(Node(step, [linked_leaf(leaf, nodes) for leaf in step.leaves], at))
    return nodes


def linked_leaf(leaf: Any, nodes: Sequence[Node]) -> Any:
    if isinstance(leaf, list):
        return [linked_leaf(ref, nodes) for ref in leaf]
    return Use(nodes[leaf.step], leaf.port) if isinstance(leaf, Ref) and leaf.step >= 0 else leaf


def unlinked(program: Program, order: Sequence[Node], results: Sequence[Any]) -> Program:
    number = {node: n for n, node in enumerate(order)}

    def ref(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return [ref(one) for one in leaf]
        return Ref(number[leaf.node], leaf.port) if isinstance(leaf, Use) else leaf

    steps = [replace(node.step, leaves=[ref(leaf) for leaf in node.leaves]) for node in order]
    return replace(program, steps=steps, results=[ref(leaf) for leaf in results])
