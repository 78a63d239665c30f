"""The residuals of a compiled forward: by default what the user saved, where it pays what a minimum cut chooses.

Only values that the user computed in between are exchanged for cheaper ones; what autograd can observe (saved inputs
and outputs, their version checks) stays as the class declares it, and under saved-tensor hooks nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self

import sympy
import torch

from ...codegen import Target
from ...ir import Graph, Value
from ...ir.errors import LoweringError
from ...ir.passes.programs.compared import hands_over_selected, pairs_of
from ...ir.passes.programs.overlap import Overlap, overlap_of
from ...ir.passes.programs.recompute import CHOICE, Recompute, apply_choice, present, value_at
from ...ir.passes.programs.views import through_views
from ...ir.program import Program, ValueRef
from ...ir.switches import is_on, watch_allows
from ...ir.types import Size, contiguous_strides
from ...tracer.trace import CaptureError
from ..capture.captured import CapturedFunction
from ..capture.captured_backward import BackwardEntry, predicted_kinds
from ..execution.aten import reference
from ..execution.graph_to_kernels import graph_of, optimize
from ..execution.layouts import expected_layout
from ..settings.internal_errors import or_fall_back
from ..values.sizes import numbers
from .streamed_residuals import streamed_program, sums_virtual_values

Tensor = torch.Tensor


def may_be_exchanged(captured: CapturedFunction, sizes: Mapping[sympy.Symbol, int]) -> bool:
    """True if forward keeps anything for backward that autograd cannot observe, so that cheaper values may be kept;

    or might, because backward would sum again what forward has summed and kernels never have in memory, or compares.
    """
    forward = captured.forward
    if forward.tensor_attributes or forward.saved_for_forward:
        return False
    keeps = forward.hidden_count or captured.is_plain or sums_virtual_values(captured, sizes) or may_compare(captured)
    if not keeps:
        return False
    return not forward.returns_hidden and not captured.returns_input_memory and is_on(_pass_of(captured))


def may_compare(captured: CapturedFunction) -> bool:
    """True where forward hands over what it selects among sums: backward may compare it with what it makes again."""
    with suppress(LoweringError):
        return hands_over_selected(forward_program(captured))
    return False


def choose(
    captured: CapturedFunction, backward: BackwardEntry, sizes: Mapping[sympy.Symbol, int],
    target: Callable[[], Target],
) -> ResidualPlan | None:
    """Cheaper residuals than the user's, None where those are best (or have to stay).

    backward: the commonest one, captured. target: of the kernels that make some of them again.
    """
    try:
        report = partial(captured.report, "backward")
        return or_fall_back(partial(_chosen, captured, backward, sizes, target), report, "saved as written")
    except (CaptureError, LoweringError):
        return None


def _pass_of(captured: CapturedFunction) -> str:
    return "overlap" if captured.is_plain else "recompute"


def _chosen(
    captured: CapturedFunction, backward: BackwardEntry, sizes: Mapping[sympy.Symbol, int],
    target: Callable[[], Target],
) -> ResidualPlan | None:
    program = program_of(captured, backward)
    if not watch_allows(_pass_of(captured), captured.name):
        return None
    if captured.is_plain:
        return _beside_arguments(program, mask_of(predicted_kinds(captured)), sizes, target)
    program = through_views(program)
    new = Recompute(sizes)(program)
    streams = streamed_program(program, new, sizes, target) if is_on("streams") or is_on("slabs") else None
    # What backward compares with a residual is no value to make again: it would have other bits.
    new = next((p for p in (streams, new) if p is not None and not pairs_of(p)), program)
    return None if new is program or program.forward.mutations else ResidualPlan.of(program, new)


def _beside_arguments(
    program: Program, mask: tuple[bool, ...], sizes: Mapping[sympy.Symbol, int], target: Callable[[], Target]
) -> ResidualPlan | None:
    """What forward hands over to a backward that was derived of it, which is given its arguments."""
    if (found := overlap_of(program)) is None:
        return None
    offered = found.offered(mask)
    now = found.program_now() if found.choose(offered, sizes) else program
    now = program if pairs_of(now) else now
    if is_on("streams") or is_on("slabs"):
        streamed = streamed_program(offered, now, sizes, target)
        if streamed is not None and not pairs_of(streamed) and found.may_make(streamed.attributes[CHOICE].saved):
            return StreamedDerivedPlan(found, streamed)
    return DerivedResidualPlan(found, now) if now is not program else None


def program_of(captured: CapturedFunction, backward: BackwardEntry) -> Program:
    """forward and a backward of it. Raises CaptureError where what backward is given has to be the user's own."""
    if backward.written_inputs:  # which has to be the memory that the user saved
        raise CaptureError(reason="its backward writes to what it is given", where=captured.backward_place())
    if backward.opaque:
        raise CaptureError(reason="its backward has opaque nodes", where=backward.opaque[0].where)
    name = f"{captured.name}_backward"
    graph_of(backward.trace, name)  # before forward, which is lowered with what this learns about sizes
    program = forward_program(captured)
    program.backward[mask_of(predicted_kinds(captured))] = graph_of(backward.trace, name)
    return program


def forward_program(captured: CapturedFunction) -> Program:
    """The same without a backward."""
    graph, results = graph_of(captured.forward.trace, f"{captured.name}_forward"), len(captured.forward.fake_outputs)
    return Program(captured.name, graph, tuple(captured.residual_places), results)


def executable_key(backend: str, chosen: ResidualPlan | None) -> str:
    """The key of an executable among those of one graph: the backend, and whose residuals it makes or takes."""
    return backend if chosen is None else f"{backend} chosen"


def mask_of(kinds: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(k is not None for k in kinds)


class ResidualPlan:
    """Cheaper residuals in the place of the user's, and the way back."""

    def __init__(
        self,
        residuals: Sequence[ValueRef | None],
        places: Sequence[ValueRef | None],
        programs: tuple[Program, Program] | Callable[[], tuple[Program, Program]],
        rebuild: Graph | None,
    ) -> None:
        """residuals: the user's; places: these; rebuild: these -> the user's.

        programs: with the user's residuals and with these; or what makes both, where another process chose.
        """
        self.residuals, self.places = tuple(residuals), list(places)
        self._programs, self._rebuild = programs, rebuild

    @classmethod
    def of(cls, captured: Program, program: Program) -> Self:
        """The residuals of `program` in the place of those of `captured`."""
        rebuild = apply_choice(program, (), _identity(captured))  # now: where backward fails it is the way back
        return cls(captured.residuals, program.residuals, (captured, program), rebuild)

    @property
    def programs(self) -> tuple[Program, Program]:
        """The program with the user's residuals, and the one with these."""
        if not isinstance(self._programs, tuple):
            self._programs = self._programs()
        return self._programs

    @property
    def captured(self) -> Program:
        """The program with the user's residuals."""
        return self.programs[0]

    @property
    def program(self) -> Program:
        """The program with these residuals."""
        return self.programs[1]

    @property
    def hidden_count(self) -> int:
        return sum(p is not None and p.kind == "hidden" for p in self.places)

    def backward_graph(self, kinds: Sequence[Any], entry: Any, name: str) -> Graph:
        """backward for these gradients, beginning with what rebuilds the user's residuals."""
        return optimize(apply_choice(self.program, mask_of(kinds), graph_of(entry.trace, name)))

    def originals(self, residuals: Sequence[Any], ctx: Any) -> list[Any]:
        """The user's residuals: their own tensors with their history, the rebuilt ones without (as in eager)."""
        with torch.no_grad():
            rebuilt = self.rebuilt(residuals, ctx._fusegrad_sizes)
        supply = iter(r for r, p in zip(residuals, self.places, strict=True) if p is None or p.kind != "hidden")
        own = [p is None or p.kind != "hidden" for p in self.residuals]
        return [next(supply) if mine else value for mine, value in zip(own, rebuilt, strict=True)]

    def rebuilt(self, residuals: Sequence[Any], sizes: dict[sympy.Symbol, int]) -> list[Any]:
        """The residuals that the user saved, from those that were kept: for the user's own backward body."""
        graph = self.rebuilding()
        made = iter(reference.run(graph, [r for r in residuals if r is not None], sizes))
        layouts = iter(graph.output_strides)
        return [None if p is None else _laid_out(p, next(made), next(layouts), sizes) for p in self.residuals]

    def rebuilding(self) -> Graph:
        """The graph from what was kept to what the user saved."""
        assert self._rebuild is not None
        return self._rebuild


def _identity(captured: Program) -> Graph:
    """The user's residuals as they are; those that only backward sees in the layouts that forward gives them."""
    graph, strides = Graph("residuals"), list[tuple[Size, ...] | None]()
    for i, place in enumerate(present(captured)):
        value = value_at(captured, place)
        assert value is not None
        graph.input(value.aval, f"residual_{i}")
        strides.append(captured.forward.strides_of_output(value) or contiguous_strides(value.shape))
    return graph.returning(graph.inputs, strides)


def _laid_out(place: ValueRef, value: Any, strides: tuple[Size, ...] | None, sizes: dict[sympy.Symbol, int]) -> Any:
    """A residual that only backward sees lies as forward gives it; others are the user's own tensors."""
    return expected_layout(value, numbers(strides, sizes)) if place.kind == "hidden" and strides is not None else value


class DerivedResidualPlan(ResidualPlan):
    """The residuals besides the arguments, for a backward that is derived of forward."""

    def __init__(self, found: Overlap, now: Program) -> None:
        super().__init__(found.program.residuals, now.residuals, (found.program, now), None)
        self.found = found

    @property
    def saved(self) -> Sequence[Value]:
        """The values of forward that are handed over."""
        return self.found.saved

    def backward_graph(self, kinds: Sequence[Any], entry: Any, name: str) -> Graph:
        """backward for these gradients, without what forward has done already."""
        return optimize(self.found.backward(graph_of(entry.trace, name)))

    def rebuilt(self, residuals: Sequence[Any], sizes: dict[sympy.Symbol, int]) -> list[Any]:
        """The arguments, which were kept as they are."""
        return list(residuals[: len(self.residuals)])


class StreamedDerivedPlan(DerivedResidualPlan):
    """The same where kernels have products that are never in memory."""

    @property
    def saved(self) -> Sequence[Value]:
        return tuple(self.program.attributes[CHOICE].saved)

    def backward_graph(self, kinds: Sequence[Any], entry: Any, name: str) -> Graph:
        """backward for these gradients, with what is virtual made again."""
        offered = self.found.on_offered(graph_of(entry.trace, name))
        return optimize(apply_choice(self.program, mask_of(kinds), offered))
