"""A captured Function: forward and backward graphs, and the values of forward that are backward's residuals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .graph import Graph


class ValueRef(NamedTuple):
    """A tensor of forward that backward reads: input i, user output i, or hidden output i of the graph."""

    kind: Literal["input", "output", "hidden"]
    index: int  # type: ignore[assignment]  # shadows tuple.index, which no caller needs


@dataclass
class Program:
    """One Function at one key.

    forward's outputs: the user's tensor outputs, then the hidden ones. A backward graph's inputs: the residuals in the
    order of `residuals`, then the gradients that are not None; its outputs: one per forward argument, None for none.
    Backward graphs are captured lazily, one per None-mask of the incoming gradients (True: the gradient is there).
    """

    name: str
    forward: Graph
    residuals: tuple[ValueRef | None, ...]
    user_outputs: int
    backward: dict[tuple[bool, ...], Graph] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
