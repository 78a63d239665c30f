"""The whole pipeline, top to bottom: a captured graph becomes steps, and each fused step becomes Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from .. import codegen
from ..codegen import Kernels, Target
from ..ir import Graph, Value, verify
from ..ir.errors import Unfusible
from ..ir.passes.contract import Contract
from ..ir.passes.fuse import Fuse, Group, Step
from ..ir.passes.simplify import Simplify
from ..ir.prims import PRIMS
from ..tracer.aten import known_about, lower
from ..tracer.capture import Trace
from . import logs
from .config import settings
from .stats import count

PASSES = (Simplify(), Contract(), Simplify())


def graph_of(trace: Trace, name: str) -> Graph:
    """A copy of the trace's graph, which is made once; again where more has become known about sizes or layouts."""
    if (name, known_about(trace)) not in trace.lowered:
        graph = _graph_of(trace, name)
        trace.lowered = {(name, known_about(trace)): graph}
    return trace.lowered[name, known_about(trace)].copy()  # type: ignore[no-any-return]


def _graph_of(trace: Trace, name: str) -> Graph:
    """trace -> lower -> simplify -> contract -> simplify."""
    names = [*trace.names, *(f"captured_{i}" for i in range(len(trace.lifted)))] if trace.names else None
    graph = cheaper(lower(trace.graph_module, [*trace.fakes, *trace.lifted], name=name, input_names=names))
    _name_outputs(graph, trace.output_names)
    return graph


def _name_outputs(graph: Graph, names: Sequence[str]) -> None:
    """Outputs that the user's source gives no name get one, so that the kernels' pointers say what they are."""
    for output, name in zip(graph.outputs, names, strict=False):
        if output is not None and output.prim != "input" and output.origin.name is None:
            output.attrs["origin"] = replace(output.origin, name=name)


def cheaper(graph: Graph) -> Graph:
    """The same program after the passes; verified after each under `config.debug`."""
    for step in PASSES:
        graph = step(graph)
        if settings().debug:
            verify(graph)
    return graph


@dataclass(frozen=True)
class Generated:
    """A graph as steps in an order that runs, the kernels of its groups by step, and why nodes were left to torch.

    refused: the same by node.
    """

    steps: list[Step]
    names: list[str]
    kernels: dict[int, Kernels]
    reasons: list[str]
    refused: Mapping[int, str] = field(default_factory=dict)


def generate(graph: Graph, target: Target, hints: Mapping[sympy.Symbol, int], name: str) -> Generated:
    """fuse -> schedule -> loops -> Triton text. A node that cannot be generated is called as it is, between kernels."""
    refused: dict[int, str] = {}
    reasons: list[str] = []
    while True:
        steps = Fuse(frozenset(refused))(graph)
        names = group_names(name, steps)
        try:
            groups = [(at, step) for at, step in enumerate(steps) if isinstance(step, Group)]
            kernels = {at: kernels_of(step, target, hints, names[at]) for at, step in groups}
        except Unfusible as error:
            refused |= dict.fromkeys(sorted(_alike(graph, error.value, frozenset(refused))), str(error))
            reasons.append(str(error))
            continue
        made = Generated(steps, names, kernels, reasons, refused)
        logs.divided(graph, made)
        return made


def _alike(graph: Graph, refused: Value, apart: frozenset[int]) -> frozenset[int]:
    """The nodes that the generator would refuse for the same reason; all of them where none is found."""
    left = [v for v in graph.order() if v.id not in apart]
    fusible = [v for v in left if PRIMS[v.prim].family not in ("extern", "contract", "pick")]
    alike = frozenset(v.id for v in fusible if v.prim == refused.prim and v.dtype == refused.dtype)
    return alike or frozenset(v.id for v in fusible)


def kernels_of(group: Group, target: Target, hints: Mapping[sympy.Symbol, int], name: str) -> Kernels:
    """schedule -> lower to loops -> emit Triton text."""
    kernels = codegen.generate(group.graph, target=target, hints=hints, name=name)
    count("compiles", len(kernels.kernels))
    logs.generated(kernels, target)
    return kernels


def text_of(kernels: Kernels, header: str = "") -> str:
    """The importable module that holds these kernels."""
    return codegen.module(kernels.kernels, header)


def group_names(name: str, steps: Sequence[Step]) -> list[str]:
    """A name for each step's kernels: the method's, numbered where there are several groups."""
    groups = [s for s in steps if isinstance(s, Group)]
    if len(groups) == 1:
        return [name if isinstance(s, Group) else "" for s in steps]
    numbers = iter(range(1, len(groups) + 1))
    return [f"{name}_{next(numbers)}" if isinstance(s, Group) else "" for s in steps]
