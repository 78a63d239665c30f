"""A captured graph to kernels, top to bottom: lowered, simplified, cut into steps, each fused step Triton text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import sympy
import torch

from ... import codegen
from ...codegen import Kernels, Target
from ...codegen.schedule.rooflines import machine_of
from ...ir import Graph, Value, verify
from ...ir.errors import LoweringError, Unfusible
from ...ir.loops.tidy import TidyLoops
from ...ir.passes.contract import Contract
from ...ir.passes.fuse import Fuse, Group, Step
from ...ir.passes.place import Places, place_concatenations
from ...ir.passes.products import Decision, Products
from ...ir.passes.simplify import Simplify
from ...ir.passes.streaming.streams import StreamDecision, Streams
from ...ir.prims import PRIMS
from ...ir.switches import should_run, show_to_watch, watch_allows
from ...ir.types import COMPLEX
from ...tracer.lowering.aten import lower, lowering_key
from ...tracer.reads.fingerprint import replaced_in_torch
from ...tracer.reads.reached import CallReached, without_calls
from ...tracer.trace import Trace
from ..kernels import proofs
from ..settings import logs
from ..settings.config import settings
from ..settings.counters import count
from ..settings.internal_errors import is_internal
from .generated import Generated

ProductsBy = Literal["model", "clock", "library"]
"""Who decides whether a product of matrices is in a kernel."""

PASSES: dict[str, Callable[[Graph], Graph]] = {
    "simplify": Simplify(), "tidy loops": TidyLoops(), "contract": Contract(), "simplify again": Simplify(),
}  # fmt: skip


def graph_of(trace: Trace, name: str) -> Graph:
    """A copy of the trace's graph, which is made once; again where more has become known about sizes or layouts."""
    if (name, lowering_key(trace)) not in trace.lowered:
        graph = _graph_of(trace, name)
        trace.lowered = {(name, lowering_key(trace)): graph}
    return trace.lowered[name, lowering_key(trace)].copy()  # type: ignore[no-any-return]


def _graph_of(trace: Trace, name: str) -> Graph:
    """trace -> lower -> simplify -> contract -> simplify. Raises LoweringError."""
    if not watch_allows("lower", name):
        raise LoweringError("it is left as it was traced")
    names = [*trace.names, *(f"captured_{i}" for i in range(len(trace.lifted)))] if trace.names else None
    try:
        with without_calls(replaced_in_torch()):
            graph = lower(trace.graph_module, [*trace.fakes, *trace.lifted], name=name, input_names=names)
    except CallReached as called:
        raise LoweringError(f"{called.name} was replaced, and what operations are made of calls it") from None
    show_to_watch("lower", trace.graph_module, graph)
    graph = optimize(graph)
    _name_outputs(graph, trace.output_names)
    return graph


def _name_outputs(graph: Graph, names: Sequence[str]) -> None:
    """Outputs that the user's source gives no name get one, so that the kernels' pointers say what they are."""
    for output, name in zip(graph.outputs, names, strict=False):
        if output is not None and output.prim != "input" and output.origin.name is None:
            output.attrs["origin"] = replace(output.origin, name=name)


def optimize(graph: Graph) -> Graph:
    """The same program after the passes; verified after each under `config.debug`."""
    for step, run in PASSES.items():
        if should_run(step, graph.name):
            before, graph = graph, run(graph)
            show_to_watch(step, before, graph)
        if settings().debug:
            verify(graph)
    return graph


MAKING = "kernels"
"""The step that makes the kernels of a group."""


def generate(
    graph: Graph, target: Target, hints: Mapping[sympy.Symbol, int], name: str, products: ProductsBy = "model"
) -> Generated:
    """fuse -> schedule -> loops -> Triton text. A node that cannot be generated is called as it is, between kernels.

    products: by the "model" a kernel or the library's call; by a "clock" a kernel wherever that moves fewer bytes, for
    a clock to compare with the call; or by the "library".
    """
    refused = unordered_scatters(graph)
    called: dict[int, Decision] = {}
    unstreamed: list[StreamDecision] = []
    reasons: list[str] = []
    streams = products != "library" and should_run("streams", graph.name)
    products = products if should_run("products", graph.name) else "library"
    writes_in_place = should_run("place", graph.name)
    while True:
        # The division: groups, calls between them, and which calls write into a concatenation or join a kernel.
        steps, places = Fuse(frozenset(refused))(graph), Places()
        if writes_in_place:
            steps, places = place_concatenations(graph, steps)
        streamed, decisions = list[StreamDecision](), list[Decision]()
        if streams:
            apart = frozenset(places).union(*(d.products for d in unstreamed))
            steps, streamed = Streams(machine_of(target), hints, apart)(graph, steps)
        if products != "library":
            fused = Products(machine_of(target), hints, frozenset({*called, *places}), products == "clock")
            steps, decisions = fused(graph, steps)
        names = group_names(name, steps)
        # A refusal in any group changes the division itself, so all of it is made again without that node; of products
        # without all that were refused. Of several products in one group the last one joined the others: it leaves.
        stream_of = {id(d.group): d for d in streamed if d.group is not None}
        product_of = {id(d.group): d for d in decisions if d.group is not None}
        kernels, refusals = _made(steps, names, product_of, target, hints)
        if refusals:
            first = refusals[0]
            left_out = [(product_of[id(r.group)], r.error.reason) for r in refusals if id(r.group) in product_of]
            called |= {product.value.id: product.refused(reason) for product, reason in left_out}
            if id(first.group) in stream_of:
                unstreamed.append(stream_of[id(first.group)].refused(first.error.reason))
            elif not left_out:
                alike = sorted(_refused_alike(graph, first.error.value, frozenset(refused)))
                refused |= dict.fromkeys(alike, str(first.error))
                reasons.append(str(first.error))
            continue
        decided: tuple[Decision | StreamDecision, ...] = (*streamed, *unstreamed, *decisions, *called.values())
        generated = Generated(steps, names, kernels, reasons, refused, decided, places)
        log_division(graph, generated)
        return generated


def _made(
    steps: Sequence[Step], names: Sequence[str], products: Container[int], target: Target,
    hints: Mapping[sympy.Symbol, int],
) -> tuple[dict[int, Kernels], list[_Refusal]]:  # fmt: skip
    """The kernels of all groups; or refusals: the first, and where it is of a product all others that are."""
    kernels: dict[int, Kernels] = {}
    refusals: list[_Refusal] = []
    for at in [at for at, s in enumerate(steps) if isinstance(s, Group) and watch_allows(MAKING, names[at])]:
        try:
            kernels[at] = _kernels_at(steps, at, target, hints, names[at])
        except _Refusal as found:
            refusals.append(found)
            if id(refusals[0].group) not in products:
                break
    return kernels, refusals


ADDED = "floats that are added to one place at once are added in no fixed order"
PUT = "which of several values that are put in one place stays depends on the order"


def unordered_scatters(graph: Graph) -> dict[int, str]:
    """The nodes whose result in a kernel would depend on which program comes first; torch's own operation has an order.

    Additions to integers have none to keep. Values that are put are put as torch does, where duplicates have no order
    too, unless it is asked for deterministic algorithms.
    """
    scatters = [v for v in graph.order() if v.prim == "scatter"]
    if torch.are_deterministic_algorithms_enabled():
        puts = {v.id: PUT for v in scatters if v.params["mode"] == "set"}
    else:
        puts = {}
    added = [v for v in scatters if v.params["mode"] == "add" and (v.aval.is_float or v.dtype in COMPLEX)]
    return puts | {v.id: ADDED for v in added}


class _Refusal(Exception):
    """No kernels for one group (internal: something in it is called instead)."""

    def __init__(self, group: Group, error: Unfusible) -> None:
        self.group, self.error = group, error


def _kernels_at(
    steps: Sequence[Step], at: int, target: Target, hints: Mapping[sympy.Symbol, int], name: str
) -> Kernels:
    group = steps[at]
    assert isinstance(group, Group)
    try:
        return kernels_of(group, target, hints, name)
    except Unfusible as error:
        raise _Refusal(group, error) from error
    except Exception as error:
        # a mistake of ours with products costs their kernels and no more: the library has them, and it is on record
        if not is_internal(error) or settings().debug or all(v.prim != "dot" for v in group.graph.order()):
            raise
        first = (str(error).strip().splitlines() or [""])[0]
        why = f"internal error: {type(error).__name__}: {first} (please report it)"
        raise _Refusal(group, Unfusible(group.outputs[0], why)) from error


def _refused_alike(graph: Graph, refused: Value, apart: frozenset[int]) -> frozenset[int]:
    """The nodes that the generator would refuse for the same reason; all of them where none is found."""
    remaining = [v for v in graph.order() if v.id not in apart]
    fusible = [v for v in remaining if PRIMS[v.prim].family not in ("extern", "contract", "scan", "pick")]
    alike = frozenset(v.id for v in fusible if v.prim == refused.prim and v.dtype == refused.dtype)
    return alike or frozenset(v.id for v in fusible)


def kernels_of(
    group: Group, target: Target, hints: Mapping[sympy.Symbol, int], name: str, bounded: bool = False
) -> Kernels:
    """schedule -> lower to loops -> emit Triton text. bounded: rows held whole may be shorter, as for `generate`."""
    kernels = codegen.generate(group.graph, target=target, hints=hints, name=name, bounded=bounded)
    count("compiles", len(kernels.kernels))
    log_kernels(kernels, target)
    if settings().debug:
        proofs.log_proofs(group, kernels)
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


def log_division(graph: Graph, generated: Generated) -> None:
    """A graph became groups and calls."""
    if not logs.fusion.isEnabledFor(logging.INFO):
        return
    from ...ir.passes.fuse import Extern
    from .fusion_report import fusion_breaks_of, groups_of  # a report of what is made here, for who asked for it

    groups = groups_of(generated)
    calls = sum(isinstance(s, Extern) for s in generated.steps)
    logs.fusion.info("%s: fused groups: %d, library calls: %d", graph.name, len(groups), calls)
    for group in groups:
        logs.fusion.info("  %s: %s; reads %s; writes %s", ", ".join(group.kernels), " ".join(group.operations),
                         ", ".join(group.reads), ", ".join(group.writes))  # fmt: skip
        logs.fusion.debug("    of %s", ", ".join(group.lines))
    for cut in fusion_breaks_of(graph, generated):
        logs.fusion.info("  %s", cut)


def log_kernels(kernels: Kernels, target: Target) -> None:
    """Kernels were generated."""
    for kernel in kernels.kernels if logs.codegen.isEnabledFor(logging.INFO) else ():
        logs.codegen.info("%s for %s\n%s", kernel.name, target, kernel.source.rstrip())
        pinned = {str(s): n for s, n in kernel.pinned.items()}
        logs.codegen.debug("%s: grid %s, %d warps, %d stages, constants %s, pinned %s, guards %s",
                           kernel.name, kernel.grid, kernel.num_warps, kernel.num_stages, kernel.constants, pinned,
                           list(kernel.guards))  # fmt: skip
