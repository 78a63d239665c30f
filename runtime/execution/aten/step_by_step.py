"""A loop without a kernel of its own: the plan of its body, made once and run at each step, for any length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from ....ir import Graph, Value
from ....ir.passes.fuse import Extern, Step
from ....ir.text.text import symbols_in
from ...values.sizes import BoundSizes, Sizes
from .loops import run_loop

Tensor = torch.Tensor
STEP_BY_STEP = "a loop over time runs step by step: its steps are launches of their own"


class BodyPlan(Protocol):
    """The plan of a body, as one step is run by it."""

    graph: Graph

    def __call__(self, inputs: Sequence[Tensor], sizes: Sizes) -> list[Tensor | None]: ...


P = TypeVar("P", bound=BodyPlan)


class StepByStep(Generic[P]):
    """Runs a `scan` by the plan of its body."""

    def __init__(self, value: Value, plan: P, device: torch.device) -> None:
        self.value, self.plan, self.device = value, plan, device
        self.symbols = sorted(symbols_in(plan.graph), key=str)

    def __call__(self, operands: Sequence[Tensor], sizes: Sizes) -> Tensor | list[Tensor]:
        # A body's launches are known by the sizes that it has itself: another length finds those of the last.
        own = BoundSizes({s: sizes[s] for s in self.symbols})
        packed = [x.contiguous() for x in operands]
        return run_loop(self.value, packed, sizes, self.device, lambda inputs: self._step(inputs, own))

    def _step(self, inputs: list[Tensor], sizes: Sizes) -> list[Any]:
        return self.plan(inputs, sizes)


def is_loop(step: Step) -> bool:
    """True for a step that is a loop, to be run step by step."""
    return isinstance(step, Extern) and step.value.prim == "scan"


def loops_among(steps: Sequence[Step]) -> Iterator[tuple[int, Value]]:
    """The loops among some steps, with their places."""
    return ((at, step.value) for at, step in enumerate(steps) if isinstance(step, Extern) and is_loop(step))
