"""Residuals for kernels that stream products: what is virtual is made again in backward, and never saved.

    saved: q, k, v, p [n, m]   ->   saved: q, k, v, and two rows [n]

Decided for both methods at once, as it changes what both do: where kernels can be generated for all that is made again,
and forward and backward together take less time than with what would be saved otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import sympy

from ...codegen import Target
from ...codegen.rooflines import machine_of
from ...ir import Graph, Value
from ...ir.errors import LoweringError
from ...ir.passes.cost import estimate
from ...ir.passes.fuse import Fuse
from ...ir.passes.programs.recompute import CHOICE, Choice, hidden_values
from ...ir.passes.programs.streamed import Streamed
from ...ir.passes.streaming.streams import MEMORY_PRICE, StreamDecision, Streams
from ...ir.passes.virtual import large_values, sums_of, virtual_values
from ...ir.program import Program
from ...ir.switches import is_on, slab_bytes
from ..capture.captured import CapturedFunction
from ..execution.graph_to_kernels import generate, graph_of, optimize, price_of_slabs

Hints = Mapping[sympy.Symbol, int]


def streamed_program(
    captured: Program, usual: Program, sizes: Hints, target_of_kernels: Callable[[], Target]
) -> Program | None:
    """The program that saves nothing virtual; None where that is no other program, or none that pays.

    usual: with what is saved otherwise. Where that would take more than a slab may hold, memory decides.
    """
    limit = _limit()
    streamed = Streamed(sizes, limit, is_on("streams"))(captured)
    if streamed is captured or _keeps_more(streamed, captured, sizes):
        return None
    target = target_of_kernels()
    ways = [_generated_seconds(g, sizes, target, limit) for g in _graphs(streamed)]
    if None in ways:
        return None
    own = sum(way[0] for way in ways if way is not None)
    memory_decides = limit is not None and _saved_bytes(usual, sizes, limit) > limit
    in_slabs = any(way[1] for way in ways if way is not None)
    price = (price_of_slabs() if in_slabs else MEMORY_PRICE) if memory_decides else 1.0
    return streamed if own <= price * sum(_modelled(g, sizes, target, limit) for g in _graphs(usual)) else None


def sums_virtual_values(captured: CapturedFunction, sizes: Hints) -> bool:
    """True where forward sums a product that is larger than its operands, or that would fill memory."""
    limit = _limit()
    if not is_on("streams") and limit is None:
        return False
    try:
        graph = graph_of(captured.forward.trace, f"{captured.name}_forward")
    except LoweringError:
        return False
    large = frozenset[int]() if limit is None else large_values(graph, sizes, limit)
    virtual = virtual_values(graph, sizes, pairs=True) if is_on("streams") else frozenset[int]()
    return bool(sums_of(graph.order(), virtual | large))


def _limit() -> int | None:
    """The memory of a slab; None where there are none."""
    return slab_bytes() if is_on("slabs") else None


def _saved_bytes(program: Program, sizes: Hints, limit: int) -> int:
    """Bytes of what forward hands over that is virtual: no kernel, and no slab, has it as a whole."""
    virtual = virtual_values(program.forward, sizes, pairs=True) | large_values(program.forward, sizes, limit)
    return sum(estimate(v.aval.nbytes, sizes) for v in hidden_values(program) if v.id in virtual)


def _keeps_more(streamed: Program, captured: Program, sizes: Hints) -> bool:
    """What large values are made of takes more memory than what the class saves; rows and brackets aside."""
    choice: Choice = streamed.attributes[CHOICE]
    kept = [v for v in choice.saved if v not in (*choice.rows, *choice.brackets)]
    own = hidden_values(captured)
    return any(v not in own for v in kept) and _bytes(kept, sizes) > _bytes(own, sizes)


def _bytes(values: Iterable[Value], sizes: Hints) -> int:
    return sum(estimate(v.aval.nbytes, sizes) for v in values)


def _graphs(program: Program) -> Iterator[Graph]:
    return (optimize(g) for g in (program.forward, *program.backward.values()))


def _generated_seconds(graph: Graph, sizes: Hints, target: Target, limit: int | None) -> tuple[float, bool] | None:
    """The model of the division for which kernels are there, and whether some of it is in slabs.

    None where something virtual is in memory as a whole.
    """
    generated = generate(graph, target, sizes, graph.name)
    decisions = [d for d in generated.products if isinstance(d, StreamDecision) and (d.products or d.pairs)]
    if any(d.fills_memory for d in decisions):
        return None
    seconds = Streams(machine_of(target), sizes, limit=limit).seconds(generated.steps, decisions)
    return seconds, any(d.slabs is not None for d in decisions)


def _modelled(graph: Graph, sizes: Hints, target: Target, limit: int | None = None) -> float:
    """The same without kernels."""
    kernels, price = is_on("streams"), price_of_slabs()
    streams = Streams(machine_of(target), sizes, kernels=kernels, limit=limit, price=price)
    return streams.seconds(*streams(graph, Fuse()(graph)))
