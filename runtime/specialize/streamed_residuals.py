"""Residuals for kernels that stream products: what is virtual is made again in backward, and never saved.

    saved: q, k, v, p [n, m]   ->   saved: q, k, v, and two rows [n]

Decided for both methods at once, as it changes what both do: where kernels can be generated for all that is made again,
and forward and backward together take less time than with what would be saved otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import sympy

from ...codegen import Target
from ...codegen.schedule.rooflines import machine_of
from ...ir import Graph
from ...ir.errors import LoweringError
from ...ir.passes.fuse import Fuse
from ...ir.passes.programs.compared import Compared
from ...ir.passes.programs.streamed import Streamed
from ...ir.passes.streaming.streams import StreamDecision, Streams
from ...ir.passes.virtual import sums_of, virtual_values
from ...ir.program import Program
from ...ir.switches import is_on
from ..capture.captured import CapturedFunction
from ..execution.graph_to_kernels import generate, graph_of, optimize

Hints = Mapping[sympy.Symbol, int]


def streamed_program(
    captured: Program, usual: Program, sizes: Hints, target_of_kernels: Callable[[], Target]
) -> Program | None:
    """The program that saves nothing virtual; None where that is no other program, or none that pays.

    usual: with what is saved otherwise.
    """
    compared = Compared(sizes)(captured)
    if compared is not captured:  # the same bits in both methods, whatever that takes
        return compared
    streamed = Streamed(sizes)(captured)
    if streamed is captured:
        return None
    target = target_of_kernels()
    seconds = [_generated_seconds(g, sizes, target) for g in _graphs(streamed)]
    if None in seconds:
        return None
    own = sum(s for s in seconds if s is not None)
    return streamed if own <= sum(_modelled(g, sizes, target) for g in _graphs(usual)) else None


def sums_virtual_values(captured: CapturedFunction, sizes: Hints) -> bool:
    """True where forward sums a product that is larger than its operands."""
    if not is_on("streams"):
        return False
    try:
        graph = graph_of(captured.forward.trace, f"{captured.name}_forward")
    except LoweringError:
        return False
    return bool(sums_of(graph.order(), virtual_values(graph, sizes)))


def _graphs(program: Program) -> Iterator[Graph]:
    return (optimize(g) for g in (program.forward, *program.backward.values()))


def _generated_seconds(graph: Graph, sizes: Hints, target: Target) -> float | None:
    """The model of the division for which kernels are there; None where something virtual is in memory."""
    generated = generate(graph, target, sizes, graph.name)
    decisions = [d for d in generated.products if isinstance(d, StreamDecision) and d.products]
    if not all(d.streamed for d in decisions):
        return None
    return Streams(machine_of(target), sizes).seconds(generated.steps, decisions)


def _modelled(graph: Graph, sizes: Hints, target: Target) -> float:
    """The same without kernels."""
    streams = Streams(machine_of(target), sizes)
    return streams.seconds(*streams(graph, Fuse()(graph)))
