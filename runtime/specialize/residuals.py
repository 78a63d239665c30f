"""What a compiled forward hands to backward: by default what the user saved, where it pays what a minimum cut chooses.

Only values that the user computed in between are exchanged for cheaper ones; what autograd can observe (saved inputs
and outputs, their version checks) stays as he declared it, and under saved-tensor hooks nothing is exchanged at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import sympy
import torch

from ...ir import Graph
from ...ir.errors import LoweringError
from ...ir.passes.overlap import Overlap, overlap
from ...ir.passes.recompute import Recompute, apply_choice, present, value_at
from ...ir.program import Place, Program
from ...ir.switches import allowed, is_on
from ...tracer.trace import CaptureError
from ..execution.aten import reference
from ..execution.pipeline import graph_of, optimize
from ..settings.internal_errors import or_fall_back

Tensor = torch.Tensor


class Saves(Protocol):
    """What is asked here of a specialization."""

    cls: type
    name: str
    forward: Any
    report: Callable[[str, str], None]

    @property
    def residual_places(self) -> list[Place | None]:
        """What it keeps for backward."""

    @property
    def shows_more(self) -> bool:
        """Whether its results show memory in which more than they stands."""

    def predicted_kinds(self) -> tuple[Any, ...]:
        """The gradients of the commonest backward."""

    def entry(self, kinds: tuple[Any, ...]) -> Any:
        """backward as it is captured for these gradients."""

    def backward_place(self) -> str:
        """`file:line` of the user's backward."""


def choose(spec: Saves, sizes: dict[sympy.Symbol, int]) -> Chosen | None:
    """The cheaper residuals of a specialisation, None where the user's own are best (or have to stay)."""
    forward, derived = spec.forward, hasattr(spec.cls, "_fusegrad_sources")
    if not (forward.hidden_count or derived) or forward.tensor_attributes or forward.saved_for_forward:
        return None
    if forward.returns_hidden or spec.shows_more or not is_on("overlap" if derived else "recompute"):
        return None
    try:
        report = partial(spec.report, "backward")
        return or_fall_back(partial(_chosen, spec, sizes, derived), report, "saved as written")
    except (CaptureError, LoweringError):
        return None


def _chosen(spec: Saves, sizes: dict[sympy.Symbol, int], derived: bool) -> Chosen | None:
    program = _program(spec)
    if not allowed("overlap" if derived else "recompute", spec.name):
        return None
    if derived:
        found = overlap(program, mask_of(spec.predicted_kinds()), sizes)
        return None if found is None else ChosenForDerived(found)
    new = Recompute(sizes)(program)
    return None if new is program or program.forward.mutations else Chosen(program, new)


def _program(spec: Saves) -> Program:
    kinds = spec.predicted_kinds()
    entry = spec.entry(kinds)
    trace = entry.trace
    if entry.written:  # which has to be the memory that the user saved
        raise CaptureError(reason="its backward writes to what it is given", where=spec.backward_place())
    if trace.opaque:
        raise CaptureError(reason="its backward has opaque nodes", where=trace.opaque[0].where)
    forward = graph_of(spec.forward.trace, f"{spec.name}_forward")
    program = Program(spec.name, forward, tuple(spec.residual_places), len(spec.forward.fake_outputs))
    program.backward[mask_of(kinds)] = graph_of(trace, f"{spec.name}_backward")
    return program


def mask_of(kinds: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(k is not None for k in kinds)


class Chosen:
    """A program with its own residuals exchanged for cheaper ones, and the way back."""

    def __init__(self, captured: Program, program: Program) -> None:
        self.captured, self.program = captured, program
        self.places: list[Place | None] = list(program.residuals)
        self._rebuild: Graph | None = self._rebuilding()  # now: where backward fails it is the way to the user's own

    @property
    def hidden_count(self) -> int:
        return sum(p is not None and p.kind == "hidden" for p in self.places)

    def backward_graph(self, kinds: Sequence[Any], entry: Any, name: str) -> Graph:
        """backward for these gradients, beginning with what rebuilds the user's residuals."""
        return optimize(apply_choice(self.program, mask_of(kinds), graph_of(entry.trace, name)))

    def originals(self, residuals: Sequence[Any], ctx: Any) -> list[Any]:
        """What the user saved: their own tensors with their history, the rebuilt ones without (as in eager)."""
        with torch.no_grad():
            rebuilt = self.rebuilt(residuals, ctx._fusegrad_sizes)
        supply = iter(r for r, p in zip(residuals, self.places, strict=True) if p is None or p.kind != "hidden")
        own = [p is None or p.kind != "hidden" for p in self.captured.residuals]
        return [next(supply) if mine else value for mine, value in zip(own, rebuilt, strict=True)]

    def rebuilt(self, residuals: Sequence[Any], sizes: dict[sympy.Symbol, int]) -> list[Any]:
        """The residuals that the user saved, from those that were kept: for his own backward body."""
        values = iter(reference.run(self.rebuilding(), [r for r in residuals if r is not None], sizes))
        return [None if p is None else next(values) for p in self.captured.residuals]

    def rebuilding(self) -> Graph:
        """What was kept -> what the user saved."""
        assert self._rebuild is not None
        return self._rebuild

    def _rebuilding(self) -> Graph | None:
        return apply_choice(self.program, (), self._identity())

    def _identity(self) -> Graph:
        graph = Graph("residuals")
        for i, place in enumerate(present(self.captured)):
            value = value_at(self.captured, place)
            assert value is not None
            graph.input(value.aval, f"residual_{i}")
        return graph.returning(graph.inputs)


class ChosenForDerived(Chosen):
    """What forward hands over besides the arguments, to a backward that is derived of it."""

    def __init__(self, found: Overlap) -> None:
        super().__init__(found.program, found.program_now())
        self.found = found

    def backward_graph(self, kinds: Sequence[Any], entry: Any, name: str) -> Graph:
        """backward for these gradients, without what forward has done already."""
        return optimize(self.found.backward(graph_of(entry.trace, name)))

    def _rebuilding(self) -> Graph | None:
        return None

    def rebuilt(self, residuals: Sequence[Any], sizes: dict[sympy.Symbol, int]) -> list[Any]:
        """The arguments, which were kept as they are."""
        return list(residuals[: len(self.captured.residuals)])
