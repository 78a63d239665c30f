"""The node of a loop: `loop(length, carries, wholes) -> (*last carries, *stacked)`, and what it is to Python.

    body(t, *carries, *wholes) -> (*carries, *one step of each stacked)

Whatever calls it (a transform, an export, another tracer) runs the loop step by step, as it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True, eq=False)
class Loop:
    """A body, and how many values it carries from step to step; what else it returns is stacked."""

    body: fx.GraphModule
    carries: int

    def run(self, body: Callable[..., Any], length: int, carries: Sequence[Any], wholes: Sequence[Any]) -> Any:
        """All steps in order. body: its own, or one that does the same."""
        steps: list[Sequence[Any]] = []
        for t in range(length):
            results = body(t, *carries, *wholes)
            carries = results[: self.carries]
            steps.append(results[self.carries :])
        return (*carries, *map(_stacked, zip(*steps, strict=True)))


def _stacked(values: Sequence[Any]) -> Any:
    return torch.stack(values)  # type: ignore[arg-type]


def loop_function(body: fx.GraphModule, carries: int) -> Callable[..., Any]:
    """The target of a loop's node."""
    loop = Loop(body, carries)

    def call(length: int, carries: Sequence[Any], wholes: Sequence[Any]) -> Any:
        return loop.run(body, length, carries, wholes)

    call.__name__ = call.__qualname__ = "loop"
    call.fusegrad_loop = loop  # type: ignore[attr-defined]
    return call


def loop_of(target: Any) -> Loop | None:
    """The loop that a node's target is; None for all else."""
    return getattr(target, "fusegrad_loop", None)


def has_loop(gm: fx.GraphModule) -> bool:
    """True if a graph has the node of a loop."""
    return any(loop_of(node.target) is not None for node in gm.graph.nodes)


def operations(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """These nodes, each loop followed by the nodes of its body."""
    for node in nodes:
        yield node
        if (loop := loop_of(node.target)) is not None:
            yield from operations(loop.body.graph.nodes)
